"""The measured functions, their autograd formulas, and arguments.

Most functions follow pytorch/pytorch#177109: they take 14 tensors of 4 elements, and clone the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import _contexts

Arguments = tuple[Sequence[Any], dict[str, Any]]


# --------------------------------------------------------------------------------------------------
# Functions


def of_tensors(count: int, body: str) -> Callable[..., Tensor]:
    """Create a function of tensors x1, x2, ...

    The schema is inferred from the signature, which may not contain `*xs`.
    """
    parameters = ", ".join(f"x{index}: Tensor" for index in range(1, count + 1))
    namespace: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def function({parameters}) -> Tensor:\n    return {body}", namespace)
    function: Callable[..., Tensor] = namespace["function"]
    return function


CLONE = of_tensors(1, "x1.clone()")
CLONE_FIRST_OF_4 = of_tensors(4, "x1.clone()")
CLONE_FIRST = of_tensors(14, "x1.clone()")
ZERO_AND_CLONE_FIRST = of_tensors(14, "x1.zero_().clone()")


ZERO_THREE_OF_21 = of_tensors(21, "[x.zero_() for x in (x1, x2, x3)][0].clone()")
ZERO_IN_PLACE = of_tensors(14, "x1.zero_()")


def negate(x1: Tensor, *, out: Tensor) -> Tensor:
    return torch.neg(x1, out=out)


def clone_typed(
    x: Tensor,
    mask: Tensor | None,
    sizes: Sequence[int],
    scale: float,
    count: int = 1,
    flag: bool = False,
    mode: str = "linear",
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return x.clone()


# --------------------------------------------------------------------------------------------------
# Gradients: as formulas of an operator, and as `torch.autograd.Function` classes


class Formula(NamedTuple):
    """The arguments of `register_autograd`."""

    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None = None


class CloneFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class CloneFirstAndSave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.save_for_backward(xs[0])
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return grad * x, *[None] * (len(ctx.needs_input_grad) - 1)


def save_first(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


PASS_ON = Formula(CloneFirst.backward)
SAVE_ONE = Formula(CloneFirstAndSave.backward, save_first)


# --------------------------------------------------------------------------------------------------
# Arguments


def tensors(count: int, *, requires_grad: bool = False) -> Callable[[], Arguments]:
    return lambda: ([torch.randn(4, requires_grad=requires_grad) for _ in range(count)], {})


def one_and_out() -> Arguments:
    return [torch.randn(4)], {"out": torch.empty(4)}


def leaves(count: int) -> Callable[[], Arguments]:
    return tensors(count, requires_grad=True)


def parameter() -> Arguments:
    """Return a leaf with a live AccumulateGrad node, like a parameter during a training step."""
    x = torch.randn(4, requires_grad=True)
    x.edge = get_gradient_edge(x)  # type: ignore[attr-defined]  # keeps the node alive
    return [x], {}


def non_leaves() -> Arguments:
    return [torch.randn(4, requires_grad=True) * 2 for _ in range(14)], {}


def wrapped_first() -> Arguments:
    return [_contexts.Wrapper(torch.randn(4)), *(torch.randn(4) for _ in range(13))], {}


def nine_arguments() -> Arguments:
    positional = [torch.randn(4), None, [2, 2], 0.5, 3, True, "cubic"]
    return positional, {"dtype": torch.float32, "device": torch.device("cpu")}
