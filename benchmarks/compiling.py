"""Measure operators under `torch.compile`: the first compilation, and calls in compiled graphs.

- torchop: an operator of `torchop.custom_op` with six arguments.
- torchop, dataclass: an operator that takes five of these in a dataclass.
- custom_op: the first operator, defined with `torch.library.custom_op`.

The first table is the CPU time of the first call of a compiled program, without the imports of
Dynamo and the backend: medians of fresh processes, with the routes in turn. The second is the time
of a call in an Inductor graph of ten calls, guards included. In the row "derived, training", the
input requires grad. torchop's formula is derived from the body, and that of custom_op is written.

The third table is the time that a call in such a graph adds to the kernel, without the fixed cost
of the graph, and the peak memory of a chain of ten calls, in multiples of a result. For families of
`out_op`, and for overloads with `torch.Tag.out`, Inductor allocates the results. For an elementwise
family, Inductor overwrites the inputs.

Results: Dynamo traces a call of torchop's handle as a call of the overload, but traces `__call__`
of `torch.library.custom_op`. It also flattens a dataclass without tracing, so the dataclass only
adds guards on the fields. With a derived formula, each call compares the state of the random number
generator with the previous one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import _harness
from _compiling_process import (
    DERIVED_ROW,
    FAMILY,
    FLAT,
    OVERWRITING,
    PLAIN_ROW,
    ROUTES,
    STOCK,
    STRUCTURED,
    STRUCTURED_ROW,
    TAGGED,
)
from _harness import Bar

# By backend, then by route: milliseconds, one number for each process.
First = dict[str, dict[str, list[float]]]
STRUCTURED_BACKEND = "aot_eager"
STOCK_MICROSECONDS = 12.8


def title(backend: str, operators: int) -> str:
    return f"{operators} operators, {backend}"


def collect_first(backends: list[str], operators: int, repeats: int) -> First:
    """Compile a program with `operators` operators, and one with half as many dataclass calls."""
    rows = {title(backend, operators): (backend, operators, (FLAT, STOCK)) for backend in backends}
    half = operators // 2
    rows[title(STRUCTURED_BACKEND, half)] = STRUCTURED_BACKEND, half, ROUTES
    first: First = {row: {route: [] for route in routes} for row, (_, _, routes) in rows.items()}
    for _ in range(repeats):
        for row, (backend, count, routes) in rows.items():
            for route in routes:
                milliseconds = _process("first", route, backend, str(count))["milliseconds"]
                first[row][route].append(milliseconds)
    return first


def _process(*arguments: str) -> Any:
    script = Path(__file__).with_name("_compiling_process.py")
    process = subprocess.run(
        [sys.executable, str(script), *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(process.stdout)


def bars(first: First, calls: Any, chains: Any, operators: int) -> list[Bar]:
    """Return the limits for the results."""
    medians = {
        row: {route: statistics.median(values) for route, values in routes.items()}
        for row, routes in first.items()
    }
    half = medians[title(STRUCTURED_BACKEND, operators // 2)]
    result = [
        Bar(f"{row}: {FLAT} / {STOCK}", routes[FLAT] / routes[STOCK], 1.0, "x")
        for row, routes in medians.items()
    ]
    ratio = half[STRUCTURED] / half[FLAT]
    result.append(
        Bar(f"{operators // 2} operators: {STRUCTURED} / {FLAT}", ratio, 0.65 / 0.51, "x")
    )
    # The limits are microseconds on a machine where a flat call of custom_op took 12.8, scaled by
    # the same call on this machine.
    for row, route, limit in (
        (PLAIN_ROW, FLAT, 4.3),
        (STRUCTURED_ROW, STRUCTURED, 5.5),
        (DERIVED_ROW, FLAT, 8.0),
    ):
        value = statistics.median(run[row][route] / run[PLAIN_ROW][STOCK] for run in calls)
        what = f"a call in a graph, {row}: {route} / {STOCK}, flat"
        result.append(Bar(what, value, limit / STOCK_MICROSECONDS, "x"))
    above = {route: _above(chains, route) for route in chains[0]["above"]}
    # One microsecond on a machine where a call of custom_op added about seven.
    what = f"time that a call in a graph adds to the kernel: {FLAT} / {STOCK}"
    result.append(Bar(what, above[FLAT] / above[STOCK], 0.15, "x"))
    for route in (FAMILY, OVERWRITING):  # equal to PyTorch's tag, plus noise
        what = f"time that a call in a graph adds to the kernel: {route} / {TAGGED}"
        result.append(Bar(what, above[route] / above[TAGGED], 1.15, "x"))
    return result


def _above(chains: Any, route: str) -> float:
    return statistics.median(run["above"][route] for run in chains)


def first_table(first: First) -> Any:
    table = _harness.table("The first compile, milliseconds", "program", *ROUTES)
    for row, routes in first.items():
        cells = [f"{statistics.median(routes[r]):.0f}" if r in routes else "-" for r in ROUTES]
        table.add_row(row, *cells)
    return table


def calls_table(calls: Any) -> Any:
    table = _harness.table("A call from a graph of Inductor, microseconds", "", *ROUTES)
    for row in calls[0]:
        medians = {r: statistics.median(run[row][r] for run in calls) for r in calls[0][row]}
        table.add_row(row, *(f"{medians[r]:.1f}" if r in medians else "-" for r in ROUTES))
    return table


def chains_table(chains: Any) -> Any:
    table = _harness.table(
        "A call in a chain", "", "added to the kernel, microseconds", "peak, results"
    )
    for route, peak in chains[0]["peak"].items():
        table.add_row(route, f"{_above(chains, route):.1f}", f"{peak:.1f}")
    return table


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--operators", type=int, default=40, help="operators per program")
    parser.add_argument("--repeats", type=int, default=5, help="processes per number")
    parser.add_argument("--rounds", type=int, default=40, help="timed blocks per call")
    parser.add_argument("--inductor", action="store_true", help="also compile with Inductor (slow)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the measuring processes; part of the reported environment
    backends = ["eager", STRUCTURED_BACKEND, *(["inductor"] * options.inductor)]
    console = _harness.console()
    with console.status("Compiling in separate processes"):
        first = collect_first(backends, options.operators, options.repeats)
        repeats = range(min(options.repeats, 3))
        calls = [_process("calls", str(options.rounds)) for _ in repeats]
        chains = [_process("chains", str(options.rounds)) for _ in repeats]
    environment = _harness.environment()
    console.print(f"torch {environment['torch']}, Python {environment['python']}; medians")
    console.print(first_table(first))
    console.print(calls_table(calls))
    console.print(chains_table(chains))
    checked = bars(first, calls, chains, options.operators)
    _harness.print_bars(console, checked)
    results = {
        "first": first,
        "calls": calls,
        "chains": chains,
        "bars": _harness.bars_as_json(checked),
    }
    _harness.write_json(options.json, results)
    return 0 if all(bar.passed for bar in checked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
