"""Faulty operators whose residuals are incorrect, and a similar correct operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import like, one, right, wrong

CHECK = "subsystems.residuals"


def with_slope(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """Define `zoo::name`, a function of one tensor, whose residual is the function's derivative."""
    residuals = {"slope": Tensor}
    op = torchop.custom_op(f"zoo::{name}", function, mutates_args=(), residuals=residuals)
    op.register_fake(fake or (lambda x: torchop.residuals(like(x), like(x))))
    op.register_vmap("sequential")

    def save(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
        ctx.save_for_backward(residuals.slope, *inputs)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        slope, x = ctx.saved_tensors
        return grad * ((2 * x).cos() * 2 if torch.is_grad_enabled() else slope)

    op.register_autograd(backward, setup_context=setup_context or save)
    return op


def right_slope(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(f"right_slope takes floating-point tensors, got {x.dtype}")
    x = x.contiguous()
    if not torchop.records_gradient():
        return (2 * x).sin()
    return torchop.residuals((2 * x).sin(), 2 * (2 * x).cos())


right(with_slope("right_slope", right_slope), one)


def another_result_in_training(x: Tensor) -> Tensor:
    x = x.contiguous()
    if not torchop.records_gradient():
        return (2 * x).sin()
    return torchop.residuals(2 * x.sin() * x.cos(), 2 * (2 * x).cos())


wrong(with_slope("another_result_in_training", another_result_in_training), CHECK, one)


def slope_of_another_dtype(x: Tensor) -> Tensor:
    x = x.contiguous()
    return torchop.residuals((2 * x).sin(), (2 * (2 * x).cos()).bfloat16())


wrong(with_slope("slope_of_another_dtype", slope_of_another_dtype), CHECK, one)

_slopes: dict[Any, Tensor] = {}


def keeps_its_slope(x: Tensor) -> Tensor:
    x = x.contiguous()
    slope = _slopes.setdefault((x.shape, x.dtype), torch.empty_like(x))
    torch.mul((2 * x).cos(), 2, out=slope)
    return torchop.residuals((2 * x).sin(), slope.view(slope.shape))


wrong(with_slope("keeps_its_slope", keeps_its_slope), CHECK, one)


def slope_of_inputs(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
    ctx.save_for_backward((2 * inputs[0]).cos() * 2, *inputs)


wrong(with_slope("slope_of_nobody", right_slope, setup_context=slope_of_inputs), CHECK, one)


def with_vmap(name: str, told: Callable[[Any], Any]) -> Any:
    """Define an operator with a vmap rule, which returns `told((result, dimension))`."""
    op = with_slope(name, right_slope)
    op.register_vmap(lambda info, in_dims, x: told((op(x.movedim(in_dims[0], 0)), 0)))
    return op


right(with_vmap("slope_in_vmap", lambda pair: torchop.residuals(pair, 0)), one)
silent = with_vmap("vmap_rule_without_residuals", lambda pair: pair)
wrong(silent, "subsystems.func", one)


def keep_slope(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
    ctx.save_for_backward(residuals.slope)


# The rule declares the residual as unbatched. So the gradient of each batch item uses the slopes of
# the whole batch, and autograd sums over them.
shared = with_vmap("vmap_rule_that_shares_residuals", lambda pair: torchop.residuals(pair, None))
shared.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=keep_slope)
wrong(shared, "subsystems.func", one)
