"""Compare the time of calling an operator with the time of calling the function directly.

Each row is a function and a kind of call. Each column is a way to make the call:

- plain call: the Python function itself, without an operator.
- torchop handle: the object returned by `torchop.custom_op`.
- torch.ops: the overload of the same operator, `torch.ops.<namespace>.<name>.default`.
- custom_op: the object returned by `torch.library.custom_op`.
- define + impl: `torch.library.define` and `impl`, called through `torch.ops`, with the formula of
  the row. It does not check aliases or bump the versions of mutated arguments.
- C++ op: TORCH_LIBRARY and a C++ kernel, called through `torch.ops`. In rows with gradients, the
  formula is a `torch::autograd::Function`.
- autograd.Function: a hand-written `torch.autograd.Function`, not an operator.

Unless a row says otherwise, the function clones the first of 14 tensors of 4 elements, as in
pytorch/pytorch#177109. Times are microseconds of CPU time per call, followed by the multiple of the
plain call, and the minimum and maximum over the processes. A process times all routes of a row in
turn, and ratios compare times of one process.

All checks are on: torchop checks results for aliases, reads the dispatcher's tables and counts
calls, and the garbage collector runs. If the counts show that calls did not take the intended path,
the benchmark fails.

Some rows need an explanation:

- "dataclass, 5 fields": the handle flattens a dataclass, and the kernel gets a rebuilt one.
  torch.ops calls the flat operator.
- "not ours": the operator is `torch.ops.aten.neg.default`. For the plain call, torchop's hook in
  the torch.ops classes is removed.
- "profiler", "dispatch mode" and "tensor subclass": torchop sends these calls to the dispatcher.
  All operators have a formula.
- "Inductor graph": one call in a graph of 10 calls.

Results: a native call takes as long as the plain call. It adds 0.1 us, as inference mode shows.
Otherwise most of this is regained, because the PyTorch calls of the kernel skip autograd. It takes
a tenth of `torch.library.custom_op`, and less than half of a C++ operator, because PyTorch converts
the arguments of the latter for the dispatcher. Calling through torch.ops adds 0.05 us. Recording
gradients costs up to 2.5 times a plain call, depending on the number of leaves, and half of an
`autograd.Function`. The engine's time in the backward is the same for all routes. Forward and
backward of a C++ operator with a C++ formula take longer than torchop's in Python. Mutation is
free, compared with 60 to 120 us in `torch.library.custom_op`. Calls through the dispatcher take
five times as long as native ones, and less than two thirds of define + impl, because no Python code
runs before the kernel unless autograd records. With a mode or subclass they take less than half,
because the call from the handler is native.
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
    """Time every call in several processes, one after the other."""
    script = Path(__file__).with_name("_calls_process.py")
    command = [sys.executable, str(script), str(rounds), *([] if cpp is None else [str(cpp)])]
    runs = []
    # Several processes, because their memory layouts cause differences of a few percent.
    for _ in range(processes):
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(process.stdout))
    return runs


def summarize(runs: list[dict[str, dict[str, float]]]) -> Results:
    """Return the median, minimum and maximum of each number over the processes."""
    return {
        row: {route: Spread.of([run[row][route] for run in runs]) for route in routes}
        for row, routes in runs[0].items()
    }


def results_table(title: str, results: Results) -> Any:
    """Return a table with a row per kind of call and a column per route."""
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
    torch.set_num_threads(1)  # as in the measuring processes; part of the reported environment
    console = _harness.console()
    try:
        cpp = _cpp_op.build()
    except NativeUnavailableError as error:
        console.print(f"Without the C++ operator: {error}", markup=False)
        cpp = None
    with console.status("Timing calls in separate processes"):
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
        import _plot  # imports matplotlib, an optional dependency

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
