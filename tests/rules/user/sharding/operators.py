from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchop

X = torch.arange(32.0).reshape(4, 8).cos()


def define(
    namespace: str, schema: str, function: Callable[..., Any], fake: Any, **options: Any
) -> Any:
    op = torchop.custom_op(f"{namespace}::op", function, schema=schema, **options)
    op.register_fake(fake)
    return op


def sine(namespace: str) -> Any:
    return define(namespace, "(Tensor x) -> Tensor", torch.sin, torch.empty_like, mutates_args=())


def add(namespace: str) -> Any:
    schema = "(Tensor x, Tensor y) -> Tensor"
    return define(namespace, schema, torch.add, lambda x, y: x.clone(), mutates_args=())
