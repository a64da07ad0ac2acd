"""Operators whose functions the tests change, in a file that pytest does not rewrite."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchop


def make_scale(namespace: str) -> Any:
    """A product with a fake kernel and a formula, in which every change matters but one."""

    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, weight: Tensor) -> Tensor:
        if x.numel() == 0:  # without effect: the product is empty, too
            return x.new_empty(x.shape)
        return x.contiguous() * weight

    @scale.register_fake
    def _(x: Tensor, weight: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @scale.register_autograd(setup_context=setup)
    def _(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x

    return scale


def make_looping(namespace: str) -> Any:
    """An operator that never returns if one statement is missing."""

    @torchop.custom_op(f"{namespace}::looping", mutates_args=())
    def looping(x: Tensor) -> Tensor:
        step = 0
        while step < 3:
            step += 1
        return x.clone()

    return looping


def make_crashing(namespace: str) -> Any:
    """An operator that ends its process if a number is another."""

    @torchop.custom_op(f"{namespace}::crashing", mutates_args=())
    def crashing(x: Tensor) -> Tensor:
        if len(os.sep) != 1:
            os.abort()
        return x.clone()

    return crashing


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Kernels:
    def method(self, x: Tensor) -> Tensor:
        return x + 1


def closing_over(amount: float) -> Callable[[Tensor], Tensor]:
    def add(x: Tensor) -> Tensor:
        return x + amount

    return add


@wrapped
def decorated(x: Tensor) -> Tensor:
    return helper(x) - 1


def helper(x: Tensor) -> Tensor:
    return x * 2


adding, subtracting = (lambda x: x + 1), (lambda x: x - 1)


def with_a_provider(namespace: str) -> Any:
    """An operator with a second kernel, whose mutants only a check of that kernel notices."""
    op = torchop.custom_op(f"{namespace}::doubled", _doubled, mutates_args=())
    op.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype))
    is_float = torch.Tensor.is_floating_point
    op.register_kernel("cpu", _doubled_fast, provider="fast", supports=lambda x: is_float(x))
    return op


def _doubled(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


def _doubled_fast(x: Tensor) -> Tensor:
    return x + x
