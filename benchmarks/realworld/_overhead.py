"""Measure how much longer a call to an operator takes than a call to its kernel.

The kernels take 5 to 500 us, but the overhead is only a fraction of a microsecond. So calls to the
operator and calls to the kernel are timed in pairs, and the overhead is the median of the
differences. Other programs on the machine slow down both calls of a pair equally. The difference
between two separate medians would be less exact.
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

    `over` is the overhead of the operator, i.e. the median of the differences. `margin` is half of
    the 95% confidence interval of `over`.
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

    `call` calls the operator, and `kernel` calls the kernel with the same arguments. The call to
    the kernel runs in the context manager that `around_kernel` creates, which sets the same
    thread-local state as the dispatcher, and for example disables autograd. Entering it is not
    timed.
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
    """Return the nanoseconds of a call to the operator and to the kernel, for each timed pair."""

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
