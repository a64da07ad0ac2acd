"""Measure the time to choose between the kernels of several providers.

Each row is a way to call the same kernel, `torch.empty_like` of the first argument:

- one kernel: an operator without providers.
- by priority: two providers, the first of which accepts every call.
- supports: the first provider has a `supports` function, whose answer is cached.
- in a block: the same, inside `with torchop.priority(...)`.
- Python: an operator whose kernel chooses like inference engines, by calling the `supports_args`
  function of each provider in priority order.
- Python table: the same, with a dictionary keyed by shapes and dtypes.

Times are nanoseconds of CPU time per call, the median over processes that time all rows in turn.
Limits apply to the median difference from "one kernel" within a process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import _harness
import torchop
from _harness import Bar, Call, Spread

ONE, PRIORITY, SUPPORTS, BLOCK = "one kernel", "by priority", "supports", "in a block"
PYTHON, PYTHON_TABLE = "Python", "Python table"
SCHEMA = "(Tensor x, Tensor y) -> Tensor"
LIMITS = {PRIORITY: 20, SUPPORTS: 150}

Function = Callable[[Tensor, Tensor], Tensor]


def kernel(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def takes_matrices(x: Tensor, y: Tensor) -> bool:
    return x.dim() == 2 and x.dtype == y.dtype


class Implementation:
    """A provider, as inference engines represent it."""

    def __init__(self, function: Function, supports_args: Callable[[Tensor, Tensor], bool]) -> None:
        self.function, self.supports_args = function, supports_args
        self.supported = True


def dispatcher() -> Function:
    """Return a function that chooses like vLLM IR: the first provider that accepts the call."""
    implementations = {"fast": Implementation(kernel, takes_matrices)}
    implementations["native"] = Implementation(kernel, lambda x, y: True)
    priority = ["fast", "native"]

    def dispatched(x: Tensor, y: Tensor) -> Tensor:
        for name in priority:
            implementation = implementations[name]
            if implementation.supported and implementation.supports_args(x, y):
                return implementation.function(x, y)
        raise NotImplementedError

    return dispatched


def table() -> Function:
    """Return `dispatcher` with a cache by shapes and dtypes, like autotuners."""
    chosen: dict[Any, Function] = {}
    dispatched = dispatcher()

    def looked_up(x: Tensor, y: Tensor) -> Tensor:
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (x, y))
        return chosen.setdefault(key, dispatched)(x, y)

    return looked_up


def measure(rounds: int) -> dict[str, float]:
    """Return the nanoseconds per call of each kind."""

    def define(name: str, function: Function = kernel) -> Any:
        return torchop.custom_op(f"bench::{name}", function, mutates_args=(), schema=SCHEMA)

    torch.set_num_threads(1)
    torchop.native.wait()
    operators = {name: define(f"op{place}") for place, name in enumerate((ONE, PRIORITY, SUPPORTS))}
    for name, supports in ((PRIORITY, None), (SUPPORTS, takes_matrices)):
        op = operators[name]
        # New functions for each operator, because CPython specializes bytecode per function.
        op.register_kernel(
            "cpu", lambda x, y: torch.empty_like(x), provider="fast", supports=supports
        )
        op.register_kernel("cpu", lambda x, y: torch.empty_like(x), provider="other")
        op.set_priority(["fast", "other"])
    operators[PYTHON] = define("python", dispatcher())
    operators[PYTHON_TABLE] = define("table", table())
    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    # Without no_grad, calls would also record for autograd that the operator has no formula.
    with torch.no_grad():
        timings = _harness.measure({n: Call(op, (x, y)) for n, op in operators.items()}, rounds)
        # Last, because the first `priority` block of a process changes the call plans.
        with torchop.priority({"bench::op2": ["fast"]}):
            pair = {ONE: Call(operators[ONE], (x, y)), BLOCK: Call(operators[SUPPORTS], (x, y))}
            inside = _harness.measure(pair, rounds)
    found = {name: 1e3 * timing.median for name, timing in timings.items()}
    # Relative to "one kernel" in the same rounds.
    return {**found, BLOCK: found[ONE] + 1e3 * (inside[BLOCK].median - inside[ONE].median)}


def bars(runs: list[dict[str, float]]) -> list[Bar]:
    """Return the limits for the results, as differences within each process."""

    def added(name: str) -> float:
        return statistics.median(run[name] - run[ONE] for run in runs)

    limits = [Bar(f"{name} - {ONE}", added(name), limit, " ns") for name, limit in LIMITS.items()]
    share = statistics.median(
        (run[SUPPORTS] - run[ONE]) / (run[PYTHON_TABLE] - run[ONE]) for run in runs
    )
    return [*limits, Bar(f"time added by {SUPPORTS} / by a {PYTHON_TABLE}", share, 0.5, "x")]


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--processes", type=int, default=5, help="processes to run, in turn")
    parser.add_argument("--rounds", type=int, default=100, help="timed blocks per call")
    parser.add_argument("--in-process", action="store_true", help="measure here, and print JSON")
    options = parser.parse_args()
    if options.in_process:
        print(json.dumps(measure(options.rounds)))
        return 0
    console = _harness.console()
    command = [sys.executable, __file__, "--in-process", "--rounds", str(options.rounds)]
    with console.status("Timing calls in separate processes"):
        runs = [json.loads(subprocess.check_output(command)) for _ in range(options.processes)]
    shown = _harness.table("Nanoseconds for one call", "", "median", "least..most", "more")
    results = {name: Spread.of([run[name] for run in runs]) for name in runs[0]}
    for name, spread in results.items():
        more = statistics.median(run[name] - run[ONE] for run in runs)
        lowest, highest = round(spread.lowest), round(spread.highest)
        shown.add_row(name, f"{spread.median:.0f}", f"{lowest}..{highest}", f"{more:+.0f}")
    console.print(shown)
    checked = bars(runs)
    _harness.print_bars(console, checked)
    as_json = {name: spread._asdict() for name, spread in results.items()}
    _harness.write_json(
        options.json,
        {"unit": "nanoseconds", "calls": as_json, "bars": _harness.bars_as_json(checked)},
    )
    return 0 if all(bar.passed for bar in checked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
