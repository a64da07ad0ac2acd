"""Operators with many kinds of signatures, each with a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

import torchop


class Case(NamedTuple):
    function: Callable[..., Any]
    fake: Callable[..., Any]
    call: Callable[[Any, Tensor], Any]


def _scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def _like_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def _minmax(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amin(0), x.amax(0)


def _minmax_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])


def _weighted_sum(xs: list[Tensor], weights: Sequence[float]) -> Tensor:
    return sum(x * w for x, w in zip(xs, weights, strict=True))


def _halves(x: Tensor) -> list[Tensor]:
    return [x[: len(x) // 2].clone(), x[len(x) // 2 :].clone()]


def _halves_fake(x: Tensor) -> list[Tensor]:
    half = x.shape[0] // 2
    rest = x.shape[1:]
    return [x.new_empty(half, *rest), x.new_empty(x.shape[0] - half, *rest)]


def _masked(x: Tensor, mask: Optional[Tensor] = None, fill: Optional[float] = None) -> Tensor:
    mask = x > 0 if mask is None else mask
    return torch.where(mask, x, 0.0 if fill is None else fill)


def _clipped(x: Tensor, *, low: float = -1.0, high: float) -> Tensor:
    return x.clip(low, high)


def _converted(x: Tensor, rounding: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    rounded = {"up": torch.ceil, "down": torch.floor}[rounding](x)
    return rounded.to(dtype=dtype, device=device, copy=True)


def _converted_fake(x: Tensor, rounding: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_like(x, dtype=dtype, device=device)


def _two_and_a_list(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.exp(), [x + 1, x + 2]


def _two_and_a_list_fake(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]


CASES = {
    "a default left out": Case(_scaled, _like_first, lambda op, x: op(x)),
    "a default given": Case(_scaled, _like_first, lambda op, x: op(x, 3.0)),
    "an argument by name": Case(_scaled, _like_first, lambda op, x: op(x=x, factor=0.5)),
    "several outputs": Case(_minmax, _minmax_fake, lambda op, x: op(x)[0] * op(x)[1]),
    "a list of tensors": Case(
        _weighted_sum,
        lambda xs, weights: torch.empty_like(xs[0]),
        lambda op, x: op([x, -x], [1, 2]),
    ),
    "a list of outputs": Case(_halves, _halves_fake, lambda op, x: op(x)[1] - op(x)[0]),
    "a tensor and a list of outputs": Case(
        _two_and_a_list, _two_and_a_list_fake, lambda op, x: op(x)[0] + op(x)[1][1]
    ),
    "optionals left out": Case(_masked, _like_first, lambda op, x: op(x)),
    "an optional tensor given": Case(_masked, _like_first, lambda op, x: op(x, x < 0)),
    "an optional number given": Case(_masked, _like_first, lambda op, x: op(x, None, 7.0)),
    "keyword-only arguments": Case(_clipped, _like_first, lambda op, x: op(x, high=0.5)),
    "a string, a dtype and a device": Case(
        _converted, _converted_fake, lambda op, x: op(x, "up", torch.float64, torch.device("cpu"))
    ),
    "a device by its name": Case(
        _converted, _converted_fake, lambda op, x: op(x, "down", torch.int32, "cpu")
    ),
}


def define(namespace: str, case: Case) -> torchop.CustomOp:
    op = torchop.custom_op(f"{namespace}::op", case.function, mutates_args=())
    op.register_fake(case.fake)
    return op


def define_cube(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::cube", mutates_args=())
    def cube(x: Tensor, shift: float = 0.0) -> Tensor:
        return x**3 + shift

    cube.register_fake(lambda x, shift=0.0: torch.empty_like(x))
    return cube
