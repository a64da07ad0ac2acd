"""Operators and tensors for native calls that go wrong, or come in unusual numbers."""

from __future__ import annotations

import pytest
import torch

import torchop

T = torch.zeros(2)


def define(namespace, function, schema="(Tensor x) -> Tensor", name="op"):
    return torchop.custom_op(f"{namespace}::{name}", function, mutates_args=(), schema=schema)


def inputs(with_grad):
    return T.clone().requires_grad_(with_grad)


GRAD = pytest.mark.parametrize("with_grad", [False, True])
