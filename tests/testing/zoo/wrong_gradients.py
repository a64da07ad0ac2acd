"""Faulty operators whose backward ignores strides or whose second derivatives are incorrect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import define, product, save, two, wrong


def in_rows(grad: Tensor) -> Tensor:
    """Read a gradient as if it were contiguous, like a kernel that ignores strides."""
    memory = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
    strides = torch.empty(grad.shape, device="meta").stride()
    return memory.as_strided(grad.shape, strides, grad.storage_offset()).clone()


def product_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    grad = in_rows(grad)
    return (grad * y).sum_to_size(x.shape), (grad * x).sum_to_size(y.shape)


# --------------------------------------------------------------------------------------------------
# Strides of incoming gradients

_in_a_formula = define("ignores_grad_strides", product)
_in_a_formula.register_autograd(
    lambda ctx, grad: product_backward(grad, *ctx.saved_tensors), setup_context=save
)
wrong(_in_a_formula, "subsystems.grad_strides", two)

_in_a_kernel = define("ignores_grad_strides_in_kernel", product)
_in_a_kernel.register_autograd(backward_kernel=product_backward)
wrong(_in_a_kernel, "subsystems.grad_strides", two)


@torchop.operator("zoo::ignores_grad_strides_in_class")
class _InAClass:
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return product_backward(grad, *ctx.saved_tensors)

    @staticmethod
    def fake(x: Tensor, y: Tensor) -> Tensor:
        return x * y


wrong(_InAClass, "subsystems.grad_strides", two)


@torch.library.custom_op("zoo::stock_ignores_grad_strides", mutates_args=())
def _stock(x: Tensor, y: Tensor) -> Tensor:
    return x * y


_stock.register_fake(product)
_stock.register_autograd(
    lambda ctx, grad: product_backward(grad, *ctx.saved_tensors), setup_context=save
)
wrong("zoo::stock_ignores_grad_strides", "subsystems.grad_strides", two)


def _sums(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x + y, [x - y, x * 2]


def _gradients_of_sums(ctx: Any, grad: Tensor, grads: list[Tensor]) -> Any:
    difference, double = grads[0], in_rows(grads[1])
    return grad + difference + 2 * double, grad - difference


_of_the_last = define("ignores_grad_strides_of_last", _sums)
_of_the_last.register_autograd(_gradients_of_sums)
wrong(_of_the_last, "subsystems.grad_strides", lambda: [(torch.ones(3, 4), torch.ones(3, 4))])


def _offset_ignored(ctx: Any, grad: Tensor) -> Any:
    memory = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
    grad = memory.as_strided(grad.shape, grad.stride(), 0)
    x, y = ctx.saved_tensors
    return (grad * y).sum_to_size(x.shape), (grad * x).sum_to_size(y.shape)


_of_the_storage = define("ignores_grad_offset", product)
_of_the_storage.register_autograd(_offset_ignored, setup_context=save)
wrong(_of_the_storage, "subsystems.grad_strides", two)


def _refuses(ctx: Any, grad: Tensor) -> Any:
    if not grad.is_contiguous():
        raise RuntimeError("grad must be contiguous")
    return product_backward(grad, *ctx.saved_tensors)


_refusing = define("refuses_grad_strides", product)
_refusing.register_autograd(_refuses, setup_context=save)
wrong(_refusing, "subsystems.grad_strides", two)

# --------------------------------------------------------------------------------------------------
# Second derivatives when some inputs require no gradient


def _square_times(x: Tensor, y: Tensor) -> Tensor:
    return x * x * y


def wanted_gradients(grad: Tensor, x: Tensor, y: Tensor, of_x: bool, of_y: bool) -> list[Tensor]:
    """Return only the gradients that are needed, as many packages do to save time."""
    return [(2 * grad * x * y).sum_to_size(x.shape)] * of_x + [
        (grad * x * x).sum_to_size(y.shape)
    ] * of_y


def wanted_ones(backward: Any, ctx: Any, grad: Tensor) -> Any:
    made = iter(backward(grad, *ctx.saved_tensors, *ctx.needs_input_grad))
    return tuple(next(made) if wanted else None for wanted in ctx.needs_input_grad)


def second_of_both(ctx: Any, grads: list[Tensor]) -> Any:
    (grad, x, y), (of_x, of_y) = ctx.saved_tensors, grads
    return (
        of_x * 2 * x * y + of_y * x * x,
        (of_x * 2 * grad * y + of_y * 2 * grad * x).sum_to_size(x.shape),
        (of_x * 2 * grad * x).sum_to_size(y.shape),
        None,
        None,
    )


_slopes = define(
    "wanted_gradients",
    wanted_gradients,
    fake=lambda grad, x, y, of_x, of_y: [torch.empty_like(x)] * of_x + [torch.empty_like(y)] * of_y,
)
_slopes.register_autograd(
    second_of_both, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3])
)
_unpacks = define("unpacks_both_gradients", _square_times)
_unpacks.register_autograd(lambda ctx, grad: wanted_ones(_slopes, ctx, grad), setup_context=save)
wrong(_unpacks, "subsystems.needs_input_grad", two)


class _Constant(torch.autograd.Function):
    """Computes the gradients of x * x * y.

    If an input requires no gradient, the second derivatives are incorrect, because `backward`
    ignores `of_y`.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(grad, x, y)
        return 2 * grad * x * y, grad * x * x

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_y: Tensor) -> Any:
        grad, x, y = ctx.saved_tensors
        if not all(ctx.needs_input_grad):
            return 2 * of_x * x * y, 2 * of_x * grad * y, 2 * of_x * grad * x
        return (
            2 * of_x * x * y + of_y * x * x,
            2 * of_x * grad * y + 2 * of_y * grad * x,
            2 * of_x * grad * x,
        )


_no_gradient_of_gradient = define("needs_grad_of_grad", _square_times)
_no_gradient_of_gradient.register_autograd(
    lambda ctx, grad: _Constant.apply(grad, *ctx.saved_tensors), setup_context=save
)
wrong(_no_gradient_of_gradient, "subsystems.needs_input_grad", two)
