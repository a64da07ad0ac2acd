"""Time every row of `calls.py` once in this process, and print the times as JSON.

    python _calls_process.py ROUNDS [FILE]

FILE is the shared library compiled from clone_first.cpp.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

# Set before torchop is imported. Otherwise the first run would compile the extension in the
# background, and measure calls through the dispatcher until then.
os.environ["TORCHOP_NATIVE"] = "require"

import torch

import _compiled_graph
import _harness
import _not_ours
import _routes
import _structured
import torchop
from _cases import CASES
from _harness import Timing
from _routes import HANDLE, OPS, Row

Microseconds = dict[str, float]


def time_row(row: Row, rounds: int) -> Microseconds:
    """Time the calls of one row by all routes, and check that torchop's took the expected path.

    Raises:
        RuntimeError: torchop's counters differ from the expected ones.
    """
    for call in row.calls.values():
        call.seconds(1)  # the first call compiles the rules or the graph
    before = Counter(torchop.native.counters(row.handle))
    timings = _harness.measure(row.calls, rounds)
    _check_ways(row, timings, Counter(torchop.native.counters(row.handle)) - before)
    return {route: timing.median / row.repeats for route, timing in timings.items()}


def _check_ways(row: Row, timings: dict[str, Timing], counted: Counter[str]) -> None:
    calls = sum(timings[route].calls for route in (HANDLE, OPS) if route in timings)
    each = Counter(row.ways).items()
    expected = Counter({way: count * calls * row.repeats for way, count in each})
    if counted != expected:
        raise RuntimeError(
            f"{row.title}: torchop counted {dict(counted)} calls, but the row measures "
            f"{dict(expected)}, so the times would be misleading."
        )


def main(rounds: str, cpp: str | None = None) -> None:
    torch.set_num_threads(1)
    if cpp is not None:
        torch.ops.load_library(cpp)
    results: dict[str, Microseconds] = {}
    for case in CASES:
        with case.context():
            row = _routes.row(case, cpp=cpp is not None)
            results[row.title] = time_row(row, int(rounds))
    row = _structured.row()
    results[row.title] = time_row(row, int(rounds))
    timings = _harness.measure(_not_ours.calls(), int(rounds))
    results[_not_ours.TITLE] = {route: timing.median for route, timing in timings.items()}
    # Last, because compiling leaves many objects that slow down garbage collections.
    row = _compiled_graph.row()
    results[row.title] = time_row(row, int(rounds))
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
