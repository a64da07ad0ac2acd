"""What does it cost to call an operator, instead of the function it was made from?

Every row is one function and one kind of call; every column is one way to make the call:

- plain call: the Python function itself, without an operator. What remains is the work.
- torchop handle: what `torchop.custom_op` returns.
- torch.ops: the overload of the same operator, `torch.ops.<namespace>.<name>.default`.
- custom_op: what `torch.library.custom_op` returns.
- define + impl: `torch.library.define` and `impl`, called through `torch.ops`, with the formula of
  the row. It checks nothing about aliases and counts no versions of mutated arguments.
- C++ op: TORCH_LIBRARY and a C++ kernel, called through `torch.ops`; where gradients are recorded,
  with a formula in C++, a `torch::autograd::Function`.
- autograd.Function: a `torch.autograd.Function` by hand, which is no operator.

The function is that of pytorch/pytorch#177109, which clones the first of 14 tensors of 4 elements,
where a row does not say otherwise. The numbers are microseconds of processor time for one call, and
how many times a plain call that is; below them, the least and the most that a process found. One
process times all routes of a row in turn; the ratios are of numbers in one process.

Nothing is turned off for it: torchop checks results for aliases, asks the dispatcher's table, and
counts, in every call, and the garbage collector runs as it does in programs. The counts show that
the calls went the way that the row is about; if they did not, there is no table.

In the row "dataclass, 5 fields", the handle takes a dataclass apart and the kernel gets another
one, made of the arguments of the flat operator that torch.ops calls.

In the row "not ours", the operator is `torch.ops.aten.neg.default`, and the plain call is what it
costs where torchop has not put a function of its own between torch.ops and PyTorch.

The rows "profiler", "dispatch mode" and "tensor subclass" are calls that torchop sends to the
dispatcher. Their operators have a formula, by every route. The last row is a graph of 10 calls,
compiled by Inductor, divided by 10.

Take-away: a native call costs what the function costs. It adds 0.1 us, which inference mode shows;
otherwise most of that comes back, because the kernel's own calls of PyTorch skip autograd, so that
a function of two such calls is cheaper as an operator. It takes a tenth of what
`torch.library.custom_op` takes, and less than half of an operator in C++, whose arguments PyTorch
converts for the dispatcher. Coming in through torch.ops adds 0.05 us. With gradients, recording is
what costs, and more for every leaf: up to two and a half times a plain call, which is still half of
an `autograd.Function`; backward keeps an eighth of that lead, for the engine's work is the same. An
operator with a kernel and a formula in C++ takes longer, forward and backward, than torchop's with
both in Python.
Mutation costs nothing more, where `torch.library.custom_op` takes 60 to 120 us. A call through the
dispatcher takes five times what a native one does, and less than two thirds of define + impl: where
nothing is to be recorded, it meets no Python on the way to the kernel. With a mode or a subclass it
takes less than half, because the call that these make in turn is native.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import _bars
import _cpp_op
import _harness
from _harness import Spread
from _routes import PLAIN, ROUTES
from torchop._errors import NativeUnavailableError

Results = dict[str, dict[str, Spread]]


def collect(processes: int, rounds: int, cpp: Path | None) -> list[dict[str, dict[str, float]]]:
    """Times every call in several processes, one after the other."""
    script = Path(__file__).with_name("_calls_process.py")
    command = [sys.executable, str(script), str(rounds), *([] if cpp is None else [str(cpp)])]
    runs = []
    # The memory that a process happens to get decides on some per cent: hence more than one.
    for _ in range(processes):
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(process.stdout))
    return runs


def summarize(runs: list[dict[str, dict[str, float]]]) -> Results:
    """The median of the processes for each number, with its spread."""
    return {
        row: {route: Spread.of([run[row][route] for run in runs]) for route in routes}
        for row, routes in runs[0].items()
    }


def results_table(title: str, results: Results) -> Any:
    """A row for each kind of call, a column for each way to make it."""
    table = _harness.table(title, "", *ROUTES)
    for row, routes in results.items():
        cells = []
        for route in ROUTES:
            base = routes.get(PLAIN) if route != PLAIN else None
            cells.append(_cell(routes[route], base) if route in routes else "-")
        table.add_row(row, *cells)
    return table


def _cell(spread: Spread, base: Spread | None) -> str:
    ratio = "" if base is None else f" {_short(spread.median / base.median)}x"
    lowest, highest = _short(spread.lowest), _short(spread.highest)
    return f"{_short(spread.median)}{ratio}\n{lowest}..{highest}"


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:.1f}"


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--processes", type=int, default=5, help="how many to run, in turn")
    parser.add_argument("--rounds", type=int, default=40, help="blocks to time of each call")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the numbers to FILE, a PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the processes that measure: the environment tells it
    console = _harness.console()
    try:
        cpp = _cpp_op.build()
    except NativeUnavailableError as error:
        console.print(f"Without the C++ operator: {error}", markup=False)
        cpp = None
    with console.status("Timing calls in processes of their own"):
        runs = collect(options.processes, options.rounds, cpp)
    results = summarize(runs)
    environment = _harness.environment()
    console.print(
        results_table(
            f"Microseconds for one call (torch {environment['torch']}, Python "
            f"{environment['python']}; medians of {options.processes} processes)",
            results,
        )
    )
    checked = _bars.bars(runs)
    _harness.print_bars(console, checked)
    if options.plot is not None:
        # Only here: without a picture to draw, nobody has to have matplotlib, or to wait for it.
        import _plot

        _plot.draw(options.plot, results, ROUTES)
    _harness.write_json(
        options.json,
        {
            "unit": "microseconds",
            "calls": {
                row: {route: spread._asdict() for route, spread in routes.items()}
                for row, routes in results.items()
            },
            "bars": _harness.bars_as_json(checked),
        },
    )
    return 0 if all(bar.passed for bar in checked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
