"""Operators that add one, defined in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchop


def plain(namespace: str, **options: Any) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), effects="ordered", **options)
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


def inlined(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), compile="inline")
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


def with_helpers(namespace: str) -> Callable[[Tensor], Tensor]:
    def op(x: Tensor) -> list[Tensor]:
        return [x + 1]

    schema = "(Tensor(a!) x) -> Tensor[]"
    handle = torchop.custom_op(f"{namespace}::op", op, mutates_args={"x"}, schema=schema)
    return lambda x: handle(x)[0]


def of_a_class(namespace: str) -> Any:
    @torchop.operator(f"{namespace}::op")
    class op:
        inplace = True
        backward = torchop.derived
        vmap = "sequential"

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x + 1

        @staticmethod
        def fake(x: Tensor) -> Tensor:
            return torch.empty_like(x)

    return op


def family(namespace: str) -> Any:
    @torchop.out_op(f"{namespace}::op", like="x", inplace=True)
    def op(x: Tensor, *, out: Tensor) -> None:
        out.copy_(x + 1)

    return op


# The names of the operators above, and of the helper operators that torchop defines for them.
NAMES = ("op", "op_", "op.out", "op__functional", "op___mutable", "op__mutable.out", "low")
NAMES += ("op__training", "op__backward")


def names(namespace: str) -> set[str]:
    every = {f"{namespace}::{name}" for name in NAMES}
    return {name for name in every if torch._C._dispatch_has_kernel(name)}


def all_names(namespace: str) -> set[str]:
    known = torch._C._dispatch_get_all_op_names()
    return {name for name in known if name.startswith(f"{namespace}::")}
