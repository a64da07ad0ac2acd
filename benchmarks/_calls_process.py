"""What calls.py runs in a process of its own: every row, timed once, printed as JSON.

    python _calls_process.py ROUNDS [FILE]

FILE holds the operators of clone_first.cpp.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

# Otherwise the extension is compiled in the background the first time, and the dispatcher measured
# until it is there. This has to come before torchop is imported.
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
    """Times the calls of one row by all routes, and checks which way those of torchop took.

    Raises:
        RuntimeError: not the way that the row is about.
    """
    for call in row.calls.values():
        call.seconds(1)  # the first may compile the rules, or the graph
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
            f"{row.title}: torchop counted {dict(counted)} of its calls, and {dict(expected)} were "
            "to be measured. The numbers would mean something else than the table says."
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
    # Last, because compiling leaves many objects behind for the garbage collector to look at.
    row = _compiled_graph.row()
    results[row.title] = time_row(row, int(rounds))
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
