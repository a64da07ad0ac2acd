"""Measure training through an operator with one residual.

Every variant computes the same two small tensors in its forward and multiplies in its backward:

- torchop: the second tensor is a residual.
- autograd.Function: the same function in a `torch.autograd.Function`.
- two results: an operator of `torch.library.custom_op` that returns both tensors.

The row "inference" is the forward alone, in which the kernel of the first variant skips the
residual. The variant "no residuals" is an operator without residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import harness
import torchop
from harness import Benchmark, Limit, Settings, Tables, Variant
from torchop import records_gradient, residuals

TABLE = "calls"
TRAINING, INFERENCE = "forward + backward", "inference"
TORCHOP, FUNCTION, SPLIT, PLAIN = "torchop", "autograd.Function", "two results", "no residuals"


def forward(x: Tensor) -> Tensor:
    # Not `torchop.residuals`, because attributes of modules with a `__getattr__` are slow.
    if not records_gradient():
        return x * x
    return residuals(x * x, x + x)


def square(x: Tensor) -> Tensor:
    return x * x


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * x, x + x


def backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
    (slope,) = ctx.saved_tensors
    return grad * slope


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x + x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return backward(ctx, grad)


def training(function: Callable[[Tensor], Tensor], x: Tensor) -> Variant:
    grad = torch.ones_like(x)

    def step() -> None:
        torch.autograd.grad(function(x), x, grad)

    return Variant(step)


def measure(settings: Settings) -> Tables:
    """Define the operators and measure both rows."""
    name = "bench_residuals::square"
    op = torchop.custom_op(name, forward, mutates_args=(), residuals={"slope": Tensor})
    op.register_autograd(
        backward,
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(residuals.slope),
    )
    plain = torchop.custom_op("bench_residuals::plain", square, mutates_args=())
    split = torch.library.custom_op("bench_residuals::split", both, mutates_args=())
    split.register_autograd(
        backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    x = torch.randn(4, requires_grad=True)
    rows = {
        TRAINING: {
            TORCHOP: training(op, x),
            FUNCTION: training(Square.apply, x),
            SPLIT: training(lambda x: split(x)[0], x),
        },
        INFERENCE: {TORCHOP: Variant(op, (x.detach(),)), PLAIN: Variant(plain, (x.detach(),))},
    }
    return {TABLE: {row: harness.measure(of, settings["rounds"]) for row, of in rows.items()}}


BENCHMARK = Benchmark(
    name="residuals",
    units={TABLE: "us"},
    parts={"calls": measure},
    settings={"processes": 3, "rounds": 100},
    limits=(
        Limit(TABLE, TRAINING, TORCHOP, 0.9, FUNCTION),
        Limit(TABLE, TRAINING, TORCHOP, 0.6, SPLIT),
        Limit(TABLE, INFERENCE, TORCHOP, 1.05, PLAIN),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
