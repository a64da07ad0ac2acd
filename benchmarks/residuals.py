"""Measure training through an operator with one residual.

All routes compute the same two small tensors in the forward, and multiply in the backward:

- torchop: an operator whose second tensor is a residual.
- autograd.Function: PyTorch's class around the same function.
- split by hand: an operator of `torch.library.custom_op` that returns both tensors.
- inference: torchop's operator without gradients, when the kernel skips the residual.
- no residuals: an operator without residuals, called without gradients.

Times are microseconds of CPU time, for forward and backward in the first three rows, and for the
forward alone in the last two. Limits apply to ratios of medians.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import _harness
import torchop
from _harness import Bar, Call
from torchop import records_gradient, residuals

OURS, FUNCTION, SPLIT = "torchop", "autograd.Function", "split by hand"
INFERENCE, PLAIN = "inference", "no residuals"


def forward(x: Tensor) -> Tensor:
    # Imported by name, because attribute access on `torchop` is slow: the module has a
    # `__getattr__` for lazy imports.
    if not records_gradient():
        return x * x
    return residuals(x * x, x + x)


def square(x: Tensor) -> Tensor:
    return x * x


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * x, x + x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x + x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return backward(ctx, grad)


def backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
    (slope,) = ctx.saved_tensors
    return grad * slope


def training(function: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    grad = torch.ones_like(x)

    def step() -> None:
        torch.autograd.grad(function(x), x, grad)

    return Call(step)


def calls() -> dict[str, Call]:
    """Define the operators, and return a call for each route."""
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
    return {
        OURS: training(op, x),
        FUNCTION: training(Square.apply, x),
        SPLIT: training(lambda x: split(x)[0], x),
        INFERENCE: Call(op, (x.detach(),)),
        PLAIN: Call(plain, (x.detach(),)),
    }


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="timed blocks per call")
    options = parser.parse_args()
    torchop.native.wait()
    torch.set_num_threads(1)
    timings = _harness.measure(calls(), options.rounds)
    console = _harness.console()
    shown = _harness.table("Microseconds", "", "median")
    for name, timing in timings.items():
        shown.add_row(name, f"{timing.median:.2f}")
    console.print(shown)
    pairs = ((OURS, FUNCTION, 0.9), (OURS, SPLIT, 0.6), (INFERENCE, PLAIN, 1.05))
    bars = [
        Bar(f"{ours} / {other}", timings[ours].median / timings[other].median, limit, "x")
        for ours, other, limit in pairs
    ]
    _harness.print_bars(console, bars)
    medians = {name: timing.median for name, timing in timings.items()}
    results = {"unit": "microseconds", "calls": medians, "bars": _harness.bars_as_json(bars)}
    _harness.write_json(options.json, results)
    return 0 if all(bar.passed for bar in bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
