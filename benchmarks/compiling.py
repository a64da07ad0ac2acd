"""What do operators cost in `torch.compile`: the first compile, and calls from a compiled graph?

- torchop: an operator of `torchop.custom_op` with five arguments beside the first.
- torchop, dataclass: one that takes these five in a dataclass.
- custom_op: the first one, made by `torch.library.custom_op`.

The first table is the processor time of a program's first call, with a backend, Dynamo and the
backend being imported before: medians of fresh processes, the routes in turn. The second is one
call of an operator in a graph of ten that Inductor compiled, guards and all, the median of the
processes. In the row of training, the input requires a gradient; the formula of torchop is derived
from the body, that of custom_op is written.

The third table is what a call in such a graph adds to its kernel, without what a graph costs once,
and the most memory that a chain of ten has at once, in results. For a family of `out_op`, and for
an overload with `torch.Tag.out`, Inductor allocates the results; those of an elementwise family it
writes over their inputs.

Take-away: Dynamo takes a call of a handle for one of the overload behind it, without tracing what
is between, where for `torch.library.custom_op` it traces `__call__`. A dataclass whose fields have
the types that it says is taken apart without a trace too, and Dynamo never looks at the object:
what it adds are the guards on the fields. A derived formula pays for comparing the state of the
random number generator with the last one in every call.
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
    """Compiles a program with `operators` operators; half as many for what a dataclass costs."""
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
    """What the library is held to."""
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
    # The limits were microseconds on a machine where a flat call of custom_op took 12.8: a busy
    # machine makes both longer.
    for row, route, limit in (
        (PLAIN_ROW, FLAT, 4.3),
        (STRUCTURED_ROW, STRUCTURED, 5.5),
        (DERIVED_ROW, FLAT, 8.0),
    ):
        value = statistics.median(run[row][route] / run[PLAIN_ROW][STOCK] for run in calls)
        what = f"a call in a graph, {row}: {route} / {STOCK}, flat"
        result.append(Bar(what, value, limit / STOCK_MICROSECONDS, "x"))
    above = {route: _above(chains, route) for route in chains[0]["above"]}
    # The limit was a microsecond where a call of custom_op adds about seven.
    what = f"what a call in a graph adds to its kernel: {FLAT} / {STOCK}"
    result.append(Bar(what, above[FLAT] / above[STOCK], 0.15, "x"))
    for route in (FAMILY, OVERWRITING):  # as little as with PyTorch's own tag, give or take noise
        what = f"what a call in a graph adds to its kernel: {route} / {TAGGED}"
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
        "A call in a chain", "", "above its kernel, microseconds", "peak, results"
    )
    for route, peak in chains[0]["peak"].items():
        table.add_row(route, f"{_above(chains, route):.1f}", f"{peak:.1f}")
    return table


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--operators", type=int, default=40, help="how many a program calls")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each number")
    parser.add_argument("--rounds", type=int, default=40, help="blocks to time of each call")
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor too: slow")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the processes that measure: the environment tells it
    backends = ["eager", STRUCTURED_BACKEND, *(["inductor"] * options.inductor)]
    console = _harness.console()
    with console.status("Compiling in processes of their own"):
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
