"""Correct operators, similar to the faulty ones in `wrong_gradients`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import define, product, right, save, two
from tests.testing.zoo.wrong_gradients import product_backward, wanted_gradients, wanted_ones


def _of_rows(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if not grad.is_contiguous():
        raise RuntimeError("grad must be contiguous")
    return (grad * y).sum_to_size(x.shape), (grad * x).sum_to_size(y.shape)


_in_a_formula = define("makes_grads_contiguous", product)
_in_a_formula.register_autograd(
    lambda ctx, grad: _of_rows(grad.contiguous(), *ctx.saved_tensors), setup_context=save
)
right(_in_a_formula, two)

_in_a_kernel = define("gets_contiguous_grads_in_kernel", product)
_in_a_kernel.register_autograd(backward_kernel=product_backward, contiguous_grads=True)
right(_in_a_kernel, two)


@torchop.operator("zoo::gets_contiguous_grads_in_class")
class _InAClass:
    contiguous_grads = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _of_rows(grad, *ctx.saved_tensors)

    @staticmethod
    def fake(x: Tensor, y: Tensor) -> Tensor:
        return x * y


right(_InAClass, two)


def _square_times(x: Tensor, y: Tensor) -> Tensor:
    return x * x * y


def _second_of_wanted(ctx: Any, grads: list[Tensor]) -> Any:
    grad, x, y = ctx.saved_tensors
    made = iter(grads)
    of_x, of_y = (next(made) if wanted else torch.zeros_like(grad) for wanted in ctx.wanted)
    return (
        of_x * 2 * x * y + of_y * x * x,
        (of_x * 2 * grad * y + of_y * 2 * grad * x).sum_to_size(x.shape),
        (of_x * 2 * grad * x).sum_to_size(y.shape),
        None,
        None,
    )


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.wanted = inputs[3:]


_slopes = define(
    "gradients_that_are_wanted",
    wanted_gradients,
    fake=lambda grad, x, y, of_x, of_y: [torch.empty_like(x)] * of_x + [torch.empty_like(y)] * of_y,
)
_slopes.register_autograd(_second_of_wanted, setup_context=_keep)
_wanted = define("asks_for_wanted_gradients", _square_times)
_wanted.register_autograd(lambda ctx, grad: wanted_ones(_slopes, ctx, grad), setup_context=save)
right(_wanted, two)


def _greatest_so_far(x: Tensor) -> Tensor:
    return x.cummax(-1).values


def _keep_positions(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0].cummax(-1).indices)


_greatest = define("greatest_so_far", _greatest_so_far)
_greatest.register_autograd(
    lambda ctx, grad: torch.zeros_like(grad).scatter_add_(-1, ctx.saved_tensors[0], grad),
    setup_context=_keep_positions,
)
# Larger versions of this example contain equal elements, where the maximum has a kink.
right(_greatest, lambda: [(torch.tensor([1.0, 3.0, 2.0]),)])
