"""Time several calls in alternation, for `check`, `bench`, recordings and tuning."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchop import native
from torchop.extend import Schema
from torchop.testing._samples import inside_a_graph
from torchop.testing.probes import copies, tensors_of

_ROUNDS, _MOST_CALLS = 15, 100  # rounds for each way to make the call, and calls per round
_LEAD_IN = 3  # untimed warm-up calls before each round


class Way(NamedTuple):
    """One of several calls to time, such as the same call with another provider."""

    make: Callable[[], Callable[[], Any]]  # creates the arguments, and returns the call to time
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Timing(NamedTuple):
    """Microseconds per call."""

    best: float  # the fastest round, as in timeit, because other processes only slow calls down
    noise: float  # median minus best; infinite with a single round
    median: float  # over the rounds
    interval: tuple[float, float]  # 95 % confidence interval of the median


def way(
    function: Callable[..., Any],
    schema: Schema,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Way:
    """Return a way to make a call. Arguments that the call writes are copied for each round.

    Without copies, repeated writes could overflow, and arithmetic with infinities is not as fast.
    """

    def make() -> Callable[[], Any]:
        args, kwargs = inside_a_graph(schema, *copies(call)) if schema.is_mutable else call
        return functools.partial(function, *args, **kwargs)

    return Way(make, mode)


def timed(
    ways: Mapping[str, Way], arguments: Any, seconds: float, *, on_device: bool = False
) -> dict[str, Timing | Exception]:
    """Time several ways to make a call. If a way raises, return its exception instead of a timing.

    Rounds are interleaved, so that a slow phase of the machine affects all ways. Accelerators run
    asynchronously, so by default only the launch of their kernels is timed.

    Args:
        ways: the calls to time, by name.
        arguments: the arguments of the call, whose tensors determine the device to synchronize.
        seconds: the time limit for each way, unless one call takes longer.
        on_device: time the kernels on the accelerator with events and cold caches.
    """
    with contextlib.suppress(native.NativeUnavailableError):
        native.wait()  # for the build of the extension, because calls are slower until it is loaded
    wait = _wait_for(arguments)
    device = _accelerator_of(arguments) if on_device else None
    a_round = _round if device is None else _device_rounds(device)
    rounds = {name: _rounds(a_round, way, wait, seconds) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, Exception] = {}
    for _ in range(_ROUNDS):
        for name in ways:
            try:  # a generator that raised or reached the time limit yields no more rounds
                times[name].extend(itertools.islice(rounds[name], 1))
            except Exception as error:
                errors[name] = error
    return {name: errors.get(name) or _timing(times[name]) for name in ways}


def _timing(times: list[float]) -> Timing:
    times = sorted(each * 1e6 for each in times)
    best, median = times[0], statistics.median(times)
    # Order statistics give a confidence interval without assuming a distribution.
    first = max(0, math.floor(len(times) / 2 - 0.98 * math.sqrt(len(times))))
    interval = times[first], times[-1 - first]
    return Timing(best, median - best if len(times) > 1 else math.inf, median, interval)


_Round = Callable[[Way, Callable[[], None], int], float]


def _rounds(a_round: _Round, way: Way, wait: Callable[[], None], seconds: float) -> Iterator[float]:
    """Yield the seconds per call of each round."""
    first = math.inf
    for _ in range(3):  # the very first call starts threads and compiles kernels
        first = max(1e-7, min(first, a_round(way, wait, 1)))
        if first > seconds:
            break
    calls = max(1, min(_MOST_CALLS, int(seconds / _ROUNDS / first)))
    for _ in range(max(1, int(seconds / calls / first))):
        yield a_round(way, wait, calls)


def _round(way: Way, wait: Callable[[], None], calls: int) -> float:
    with way.mode():
        call = way.make()
        for _ in range(_LEAD_IN if calls > 1 else 0):
            call()
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls


def _device_rounds(device: torch.device) -> _Round:
    """Return a round for an accelerator that times each call with events."""
    # Larger than any cache, so filling it evicts the arguments. Filling it also takes longer than
    # launching the call, so the measured time contains no wait for Python.
    memory = torch.empty(2**28, dtype=torch.int8, device=device)

    def a_round(way: Way, wait: Callable[[], None], calls: int) -> float:
        with way.mode():
            call = way.make()
            for _ in range(_LEAD_IN if calls > 1 else 0):
                call()
            stream, events = torch.accelerator.current_stream(device), []
            for _ in range(calls):
                start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
                memory.zero_()
                start.record(stream)
                call()
                end.record(stream)
                events.append((start, end))
            wait()
            return sum(start.elapsed_time(end) for start, end in events) / 1e3 / calls

    return a_round


def _accelerator_of(arguments: Any) -> torch.device | None:
    devices = (tensor.device for tensor in tensors_of(arguments))
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def _wait_for(arguments: Any) -> Callable[[], None]:
    """Return a function that synchronizes the accelerator of the arguments, if there is one.

    An unused accelerator must not be queried, because that initializes it.
    """
    device = _accelerator_of(arguments)
    return lambda: None if device is None else torch.accelerator.synchronize(device)
