"""What a call of an accelerated operator costs more than its kernel.

Kernels take 5 to 500 us here, and what is asked for is a fraction of one. So each call stands next
to a call of the kernel, first before and then after it, and the median of the differences is taken:
what else the machine does falls on both. Medians of two long runs would differ by more.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

SECONDS, FEWEST, MOST = 0.2, 200, 4000


class Overhead(NamedTuple):
    """Microseconds.

    Attributes:
        call: what a call takes.
        kernel: what the kernel takes alone.
        over: what a call takes more.
        margin: the true median of that is within this, with 95% confidence.
    """

    call: float
    kernel: float
    over: float
    margin: float


def overhead(
    call: Callable[[], object],
    kernel: Callable[[], object],
    around_kernel: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Overhead:
    """Times pairs of calls.

    Args:
        call: the call.
        kernel: the same of the kernel.
        around_kernel: what the dispatcher does to the thread before it runs the kernel, such as to
            switch autograd off; not timed.
    """
    _pairs(call, kernel, around_kernel, 20)
    probe = _pairs(call, kernel, around_kernel, 20)
    seconds = sum(statistics.median(column) for column in zip(*probe, strict=True)) / 1e9
    count = min(MOST, max(FEWEST, int(SECONDS / seconds)))
    times = _pairs(call, kernel, around_kernel, count)
    # Who comes second finds other things in the caches; half of the pairs are the other way round.
    halves = [[call - kernel for call, kernel in times[half::2]] for half in (0, 1)]
    over = statistics.mean(statistics.median(half) for half in halves)
    calls, kernels = (statistics.median(column) for column in zip(*times, strict=True))
    return Overhead(calls / 1e3, kernels / 1e3, over / 1e3, max(map(_margin, halves)) / 1e3)


def _pairs(
    call: Callable[[], object],
    kernel: Callable[[], object],
    around_kernel: Callable[[], AbstractContextManager[object]],
    count: int,
) -> list[tuple[int, int]]:
    """Nanoseconds of a call and of the kernel; every other time the kernel goes first."""

    def time_kernel() -> int:
        with around_kernel():
            return _timed(kernel)

    pairs = []
    for _ in range((count + 1) // 2):
        first, second = _timed(call), time_kernel()
        pairs.append((first, second))
        first, second = time_kernel(), _timed(call)
        pairs.append((second, first))
    return pairs


def _timed(call: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def _margin(values: list[int]) -> float:
    """Half of what lies between the order statistics that enclose the median, 95% of the time."""
    ordered, away = sorted(values), math.sqrt(len(values))
    low, high = int(len(values) / 2 - away), int(len(values) / 2 + away)
    return (ordered[high] - ordered[low]) / 2
