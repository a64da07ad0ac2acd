"""Measure how much longer a call to an operator takes than a call to its kernel.

The kernels take 5 to 500 us, but the overhead is only a fraction of a microsecond. To measure it
exactly, we alternate between calls to the operator and calls to the kernel, and return the median
of the differences. Other programs on the machine slow down both calls of such a pair equally. The
difference between two separate medians would be less exact.
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
    """The times of a call, in microseconds.

    Attributes:
        call: the time of the call to the operator.
        kernel: the time of the call to the kernel.
        over: the overhead, i.e. the median of the differences.
        margin: half of the 95% confidence interval of `over`.
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
    """Measure the overhead of a call.

    Args:
        call: calls the operator.
        kernel: calls the kernel with the same arguments.
        around_kernel: creates a context manager around the call to the kernel. It sets the same
            thread-local state as the dispatcher, for example disables autograd. Not timed.
    """
    _pairs(call, kernel, around_kernel, 20)
    probe = _pairs(call, kernel, around_kernel, 20)
    seconds = sum(statistics.median(column) for column in zip(*probe, strict=True)) / 1e9
    count = min(MOST, max(FEWEST, int(SECONDS / seconds)))
    times = _pairs(call, kernel, around_kernel, count)
    # In half of the pairs, the kernel was called first. Average over both halves, because the
    # second call of a pair is faster or slower than the first one, due to the CPU's caches.
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
    """Time pairs of a call to the operator and a call to the kernel, in alternating order.

    Returns:
        The times of both calls of each pair, in nanoseconds.
    """

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
    """Return half of the 95% confidence interval of the median, computed from order statistics."""
    ordered, away = sorted(values), math.sqrt(len(values))
    low, high = int(len(values) / 2 - away), int(len(values) / 2 + away)
    return (ordered[high] - ordered[low]) / 2
