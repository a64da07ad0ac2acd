"""Faulty gradients that are wrong only for rare sizes, layouts, values or dtypes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, one, save, two, wrong


def _sine(name: str, backward: Any, setup: Any = save) -> Any:
    op = define(name, lambda x: x.sin(), fake=torch.empty_like, schema="(Tensor x) -> Tensor")
    op.register_autograd(backward, setup_context=setup)
    return op


def _single_precision(ctx: Any, grad: Tensor) -> Tensor:
    """Approximates the cosine in float32, with an error of several percent."""
    (x,) = ctx.saved_tensors
    return grad * (1 - x * x / 2 if x.dtype is torch.float32 else x.cos())


def _first_block(ctx: Any, grad: Tensor) -> Tensor:
    result = torch.zeros_like(grad, memory_format=torch.contiguous_format)
    full = grad * ctx.saved_tensors[0].cos()
    result.view(-1)[:1024] = full.reshape(-1)[:1024]
    return result


def _without_offset(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * x.as_strided(x.shape, x.stride(), 0).cos()


def _squeezed(ctx: Any, grad: Tensor) -> Tensor:
    """Adds the gradients of all elements if a dimension has size 1."""
    (x,) = ctx.saved_tensors
    return x.cos() * (grad.sum() if 1 in x.shape else grad)


for number, backward in enumerate((_single_precision, _first_block, _without_offset, _squeezed)):
    wrong(_sine(f"rare_gradient_{number}", backward), "subsystems.gradcheck", one)


def _clears_input(ctx: Any, inputs: Any, output: Any) -> None:
    """Writes to the argument through its address, which autograd does not notice."""
    x = inputs[0].detach()
    ctx.save_for_backward(x.clone())
    if x.is_contiguous() and x.device.type == "cpu" and type(x) is Tensor:
        ctypes.memset(x.data_ptr(), 0, x.nbytes)


_stock_sine = torch.library.custom_op(
    "zoo::clears_its_argument", lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor"
)
_stock_sine.register_fake(torch.empty_like)
_stock_sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=_clears_input
)
wrong("zoo::clears_its_argument", "subsystems.saved", one)


def sine_plus(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x.sin() if y is None else x.sin() + y


def _both_or_first(ctx: Any, grad: Tensor) -> Any:
    """Forgets the cosine if `y` is absent."""
    x, *rest = ctx.saved_tensors
    return (grad * x.cos(), grad) if rest else (grad, None)


_plus = define("gradient_of_absent", sine_plus, fake=lambda x, y=None: torch.empty_like(x))
_plus.register_autograd(_both_or_first, setup_context=save)
wrong(_plus, "subsystems.gradcheck", two)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1).sqrt()


def _divided_by_distance(ctx: Any, grad: Tensor) -> Any:
    """Divides 0 by 0 if two points are equal."""
    x, y = ctx.saved_tensors
    result = grad.unsqueeze(-1) * (x - y) / _distances(x, y).unsqueeze(-1)
    return result, -result


_apart = define("distances_apart", _distances)
_apart.register_autograd(_divided_by_distance, setup_context=save)
wrong(_apart, "subsystems.gradcheck", two)


def _of_sigmoid(ctx: Any, grad: Tensor) -> Tensor:
    """Divides infinity by infinity for large negative numbers."""
    power = ctx.saved_tensors[0].neg().exp()
    return grad * power / (1 + power) ** 2


_curve = define("sigmoid_that_overflows", torch.sigmoid, schema="(Tensor x) -> Tensor")
_curve.register_autograd(_of_sigmoid, setup_context=save)
wrong(_curve, "subsystems.gradcheck", one)

_KEPT: dict[Any, Tensor] = {}


def _kept_factor(ctx: Any, grad: Tensor) -> Tensor:
    """Caches the cosine by shape and dtype, although it depends on the values."""
    (x,) = ctx.saved_tensors
    return grad * _KEPT.setdefault((x.shape, x.dtype), x.detach().cos())


def _seeding(ctx: Any, grad: Tensor) -> Tensor:
    torch.manual_seed(0)
    return grad * ctx.saved_tensors[0].cos()


wrong(_sine("keeps_its_factor", _kept_factor), "subsystems.grad_memory", one)
wrong(_sine("seeds_in_backward", _seeding), "contracts.process", one)
