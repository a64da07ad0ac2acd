"""Measure the definition of operators, and the first use of one in a process.

Packages register hundreds of operators on import, so their users pay for it at every start. Each
number is the median of several processes, with the routes in turn:

- torchop: `torchop.custom_op`.
- custom_op: `torch.library.custom_op`.
- define + impl: `torch.library.define` and `impl`, with a written schema and no checks, and rules
  of `torch.library.register_fake` and `register_autograd`.

The operators have three different signatures with one to three tensors. Memory is the growth of the
process without the user's functions.

Results: torchop takes a third of the time and half of the memory of `torch.library.custom_op`. It
takes more time than `define`, which infers and checks nothing. With a fake kernel and a formula,
define + impl is as slow as `torch.library.custom_op`.

The first call of an operator parses the schema and compiles the rules. The first call in a process
is slow with `torch.library.custom_op`, which imports Dynamo, as slow as importing torch. torchop
loads the extension then, in 3 ms, and not earlier, because many programs define operators that they
never call.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _harness
from _fresh_process import CONTENTS, CUSTOM_OP, KERNEL_ONLY, LOW_LEVEL, ROUTES, TORCHOP
from _harness import Bar

# Nested results by name, numbers at the bottom: one process's, or the medians of many.
Results = dict[str, Any]


def collect(operators: int, repeats: int) -> Results:
    """Run every measurement `repeats` times, in turn.

    Returns:
        The medians, and for the import the minimum, because its limit is an absolute time and other
        load can only add to it.
    """
    runs: dict[tuple[str, ...], list[Results]] = defaultdict(list)
    for _ in range(repeats):
        runs["import",].append(_fresh_process("import"))
        for route in ROUTES:
            runs["first", route].append(_fresh_process("first", route))
        for contents in CONTENTS:
            for route in ROUTES:
                result = _fresh_process("many", route, contents, str(operators))
                runs["many", contents, route].append(result)
    return {
        "import": min(runs["import",], key=lambda run: run["milliseconds"]),
        "first": {route: _medians(runs["first", route]) for route in ROUTES},
        "many": {
            contents: {route: _medians(runs["many", contents, route]) for route in ROUTES}
            for contents in CONTENTS
        },
    }


def _fresh_process(*arguments: str) -> Results:
    script = Path(__file__).with_name("_fresh_process.py")
    # Installed packages come with bytecode. Without it, the import would compile the source.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        [sys.executable, str(script), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    result: Results = json.loads(process.stdout)
    return result


def _medians(runs: Sequence[Any]) -> Any:
    if isinstance(runs[0], dict):
        return {key: _medians([run[key] for run in runs]) for key in runs[0]}
    return statistics.median(runs)


def bars(results: Results) -> list[Bar]:
    """Return the limits for the results."""
    ours, stock, low_level = (
        results["many"][KERNEL_ONLY][route] for route in (TORCHOP, CUSTOM_OP, LOW_LEVEL)
    )
    time = ours["microseconds"]
    first = results["first"][TORCHOP]
    dynamo = sum(step["dynamo_modules"] for step in first.values())
    return [
        Bar("time to register / custom_op", time / stock["microseconds"], 0.4, "x"),
        Bar("time to register / define + impl", time / low_level["microseconds"], 4.5, "x"),
        Bar("memory of an operator", ours["kilobytes"], 16, " KB"),
        Bar("first definition in a process", first["definition"]["milliseconds"], 2, " ms"),
        Bar("first training step", first["training step"]["milliseconds"], 5, " ms"),
        Bar("import torchop, after torch", results["import"]["milliseconds"], 50, " ms"),
        Bar("torch._dynamo modules imported by defining, calling and training", dynamo, 0),
    ]


def many_table(results: Results, operators: int) -> Any:
    table = _harness.table(f"Registering {operators} operators, each", "with", *ROUTES)
    for contents, routes in results["many"].items():
        cells = [f"{r['microseconds']:.0f} us  {r['kilobytes']:.1f} KB" for r in routes.values()]
        table.add_row(contents, *cells)
    return table


def first_table(results: Results) -> Any:
    table = _harness.table("First use in a process: time, and imported modules", "", *ROUTES)
    for step in results["first"][TORCHOP]:
        table.add_row(step, *(_first(routes[step]) for routes in results["first"].values()))
    return table


def _first(step: Results) -> str:
    dynamo = ", torch._dynamo too" if step["dynamo_modules"] else ""
    return f"{step['milliseconds']:.2f} ms, {step['modules']:.0f}{dynamo}"


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--operators", type=int, default=1000, help="operators to register")
    parser.add_argument("--repeats", type=int, default=5, help="processes per number")
    options = parser.parse_args()
    console = _harness.console()
    with console.status("Registering operators in separate processes"):
        results = collect(options.operators, options.repeats)
    environment = _harness.environment()
    console.print(f"torch {environment['torch']}, Python {environment['python']}; medians")
    console.print(many_table(results, options.operators))
    console.print(first_table(results))
    checked = bars(results)
    _harness.print_bars(console, checked)
    _harness.write_json(options.json, {**results, "bars": _harness.bars_as_json(checked)})
    return 0 if all(bar.passed for bar in checked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
