"""What does it cost to call an operator, instead of the function it was made from?

Every row is one function and one kind of call; every column is one way to make the call:

- plain call: the Python function itself, without an operator. What remains is the work.
- torchop handle: what `torchop.custom_op` returns.
- torch.ops: the overload of the same operator, `torch.ops.<namespace>.<name>.default`.
- custom_op: what `torch.library.custom_op` returns.
- define + impl: `torch.library.define` and `impl`, called through `torch.ops`. It checks nothing
  about aliases and counts no versions of mutated arguments; `torch.library.register_autograd` gives
  it a formula.

The first rows are the benchmark of pytorch/pytorch#177109: 14 tensors of 4 elements, one of which
is cloned. The numbers are microseconds for one call, and their ratio to the plain call.

Take-away: every column but the first goes through PyTorch's dispatcher. The trip through it, from
one kernel of the operator to the next, is most of what a small operator costs: six to thirteen
times a plain call for torchop. That is a tenth less than `torch.library.custom_op` takes, and three
to four times less where a formula saves tensors or an argument is mutated. define + impl takes half
of either because it promises less; a formula ends that. Only a call that never enters the
dispatcher can come near a plain one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import _harness
import torchop
from _harness import Call, Timing

PLAIN, HANDLE, OPS, CUSTOM_OP, LOW_LEVEL = ROUTES = (
    "plain call",
    "torchop handle",
    "torch.ops",
    "custom_op",
    "define + impl",
)


# --------------------------------------------------------------------------------------------------
# What is called


def clone_first(
    x1: Tensor,
    x2: Tensor,
    x3: Tensor,
    x4: Tensor,
    x5: Tensor,
    x6: Tensor,
    x7: Tensor,
    x8: Tensor,
    x9: Tensor,
    x10: Tensor,
    x11: Tensor,
    x12: Tensor,
    x13: Tensor,
    x14: Tensor,
) -> Tensor:
    return x1.clone()


def zero_and_clone_first(
    x1: Tensor,
    x2: Tensor,
    x3: Tensor,
    x4: Tensor,
    x5: Tensor,
    x6: Tensor,
    x7: Tensor,
    x8: Tensor,
    x9: Tensor,
    x10: Tensor,
    x11: Tensor,
    x12: Tensor,
    x13: Tensor,
    x14: Tensor,
) -> Tensor:
    return x1.zero_().clone()


def clone(x: Tensor) -> Tensor:
    return x.clone()


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


class Formula(NamedTuple):
    """A backward formula, as `register_autograd` takes it."""

    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None = None


class Case(NamedTuple):
    """One row: a function, how it becomes an operator, and how it is called."""

    name: str
    title: str
    function: Callable[..., Tensor]
    arguments: Callable[[], tuple[Sequence[Any], dict[str, Any]]]
    formula: Formula | None = None
    mutates_args: tuple[str, ...] = ()
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def _tensors(
    count: int, *, requires_grad: bool = False
) -> Callable[[], tuple[Sequence[Any], dict[str, Any]]]:
    return lambda: ([torch.randn(4, requires_grad=requires_grad) for _ in range(count)], {})


def _nine_arguments() -> tuple[Sequence[Any], dict[str, Any]]:
    positional = [torch.randn(4), None, [2, 2], 0.5, 3, True, "cubic"]
    return positional, {"dtype": torch.float32, "device": torch.device("cpu")}


def _gradient_of_first(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, *[None] * 13


def _gradient_from_saved(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return grad * x, *[None] * 13


def _save_first(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    return grad


FOURTEEN = Case("fourteen", "14 tensors, no grad", clone_first, _tensors(14))
FOURTEEN_GRAD = Case(
    "fourteen_grad",
    "14 tensors, grad, formula",
    clone_first,
    _tensors(14, requires_grad=True),
    Formula(_gradient_of_first),
)
ONE = Case("one", "1 tensor, no grad", clone, _tensors(1))
ONE_GRAD = Case(
    "one_grad",
    "1 tensor, grad, formula",
    clone,
    _tensors(1, requires_grad=True),
    Formula(_gradient),
)
CASES = (
    FOURTEEN,
    FOURTEEN_GRAD,
    Case(
        "fourteen_saved",
        "14 tensors, grad, saves one",
        clone_first,
        _tensors(14, requires_grad=True),
        Formula(_gradient_from_saved, _save_first),
    ),
    Case(
        "inference",
        "14 tensors, inference mode",
        clone_first,
        _tensors(14),
        mode=torch.inference_mode,
    ),
    Case(
        "mutation",
        "14 tensors, mutates one",
        zero_and_clone_first,
        _tensors(14),
        mutates_args=("x1",),
    ),
    ONE,
    ONE_GRAD,
    Case("typed", "9 typed arguments", clone_typed, _nine_arguments),
)


# --------------------------------------------------------------------------------------------------
# How it is called


def compare(case: Case, rounds: int) -> dict[str, Timing]:
    """Times one case by all routes."""
    functions = _by_route(case)
    with case.mode():
        args, kwargs = case.arguments()
        calls = {route: Call(function, args, kwargs) for route, function in functions.items()}
        return _harness.measure(calls, rounds)


def _by_route(case: Case) -> dict[str, Callable[..., Tensor]]:
    """Defines the operators of a case, and returns what to call for each route."""
    name, function, mutates_args = case.name, case.function, case.mutates_args
    low_level = f"bench_low_level::{name}"
    ours = torchop.custom_op(f"bench_torchop::{name}", function, mutates_args=mutates_args)
    stock = torch.library.custom_op(f"bench_custom_op::{name}", function, mutates_args=mutates_args)
    schema = torch.library.infer_schema(function, mutates_args=mutates_args)
    torch.library.define(low_level, schema)
    torch.library.impl(low_level, "cpu", function)
    if case.formula is not None:
        backward, setup_context = case.formula
        ours.register_autograd(backward, setup_context=setup_context)
        for op in (stock, low_level):
            torch.library.register_autograd(op, backward, setup_context=setup_context)
    return {
        PLAIN: case.function,
        HANDLE: ours,
        OPS: ours.overload,
        CUSTOM_OP: stock,
        LOW_LEVEL: getattr(torch.ops.bench_low_level, name).default,
    }


def results_table(title: str, results: dict[str, dict[str, Timing]]) -> Any:
    """Medians and ratios, a row for each case."""
    table = _harness.table(title, "microseconds for one call", *ROUTES)
    for case, timings in results.items():
        plain = timings[PLAIN].median
        cells = [f"{timings[PLAIN].median:.2f}"]
        for route in ROUTES[1:]:
            median = timings[route].median
            cells.append(f"{median:.2f} ({median / plain:.1f}x)")
        table.add_row(case, *cells)
    return table


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="blocks to time of each call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = _harness.console()
    with console.status("Timing calls") as status:
        results = {}
        for case in CASES:
            status.update(case.title)
            results[case.title] = compare(case, options.rounds)
    environment = _harness.environment()
    console.print(
        results_table(
            f"Calls (torch {environment['torch']}, Python {environment['python']}, 1 thread; "
            "in brackets: times a plain call)",
            results,
        )
    )
    _harness.write_json(
        options.json,
        {
            "unit": "microseconds",
            "calls": {
                case: {route: timing._asdict() for route, timing in timings.items()}
                for case, timings in results.items()
            },
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
