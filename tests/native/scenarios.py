"""Tensors, and four ways to define an operator, for tests of native calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import torchop
from tests._support.devices import BACKEND

T = torch.zeros(2)


def define(namespace, function, schema="(Tensor x) -> Tensor", name="op"):
    return torchop.custom_op(f"{namespace}::{name}", function, mutates_args=(), schema=schema)


def inputs(with_grad):
    return T.clone().requires_grad_(with_grad)


GRAD = pytest.mark.parametrize("with_grad", [False, True])


class Made(NamedTuple):
    call: Any
    name: str


class Makers:
    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.undo: list[Callable[[], object]] = []

    def custom_op(self, kernel: Any, schema: str) -> Any:
        return torchop.custom_op(f"{self.namespace}::op", kernel, mutates_args=(), schema=schema)

    def low_level(self, kernel: Any, schema: str) -> Any:
        return self._implemented(torchop, kernel, schema)

    def stock_custom_op(self, kernel: Any, schema: str) -> Any:
        op = torch.library.custom_op(
            f"{self.namespace}::op", kernel, mutates_args=(), schema=schema
        )
        self._accelerate()
        return op

    def stock_low_level(self, kernel: Any, schema: str) -> Any:
        op = self._implemented(torch.library, kernel, schema)
        self._accelerate()
        return op

    def _implemented(self, maker: Any, kernel: Any, schema: str) -> Any:
        library = maker.Library(self.namespace, "FRAGMENT")
        self.undo.append(library._destroy)
        library.define(f"op{schema}")
        library.impl("op", kernel, BACKEND)
        return getattr(torch.ops, self.namespace).op.default

    def _accelerate(self) -> None:
        self.undo.append(torchop.accelerate(f"{self.namespace}::*").undo)
