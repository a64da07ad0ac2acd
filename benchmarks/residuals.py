"""Measure training with an operator that has a residual, i.e. an output that only backward uses.

All variants compute two small tensors in the forward, and use the second one in the backward:

- torchop: the second tensor is a residual.
- autograd.Function: a `torch.autograd.Function` saves the second tensor.
- two results: an operator of `torch.library.custom_op` returns both tensors.

The row "inference" measures just the forward. In this row, torchop's kernel does not compute the
residual. The variant "no residuals" is an operator of torchop without residuals.
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
    # Don't write `torchop.residuals` here: looking up attributes of a module is slow if the module
    # has a `__getattr__`.
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
