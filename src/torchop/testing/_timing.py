"""What calls cost, timed in turns: for the report of `check`, `bench`, recordings and tuning."""

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

_ROUNDS, _MOST_CALLS = 15, 100  # of each way, and of a round
_LEAD_IN = 3  # untimed calls before a round, which pay for what the round before has left


class Way(NamedTuple):
    """A way of calling an operator."""

    make: Callable[[], Callable[[], Any]]  # makes the arguments, and returns what is timed
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Timing(NamedTuple):
    """Microseconds for a call."""

    best: float  # of the fastest round, as in timeit: other processes cause what is above it
    noise: float  # how far a typical round is above the fastest; infinite if there was only one
    median: float  # of the rounds
    interval: tuple[float, float]  # that the median is in, with a confidence of 95 %


def way(
    function: Callable[..., Any],
    schema: Schema,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Way:
    """A way to make a call; what it writes gets fresh contents for each round.

    After many calls they might overflow, and arithmetic with infinities takes another time.
    """

    def make() -> Callable[[], Any]:
        args, kwargs = inside_a_graph(schema, *copies(call)) if schema.is_mutable else call
        return functools.partial(function, *args, **kwargs)

    return Way(make, mode)


def timed(
    ways: Mapping[str, Way], arguments: Any, seconds: float, *, on_device: bool = False
) -> dict[str, Timing | Exception]:
    """Times several ways to make a call, or says what a way raises.

    They take turns, so that what slows the machine down slows all of them. On an accelerator, which
    runs asynchronously, a call costs what it takes to start it.

    Args:
        ways: what to time, by name.
        arguments: of the call, whose tensors tell whether an accelerator has to be waited for.
        seconds: how long to time each way, unless one call takes longer.
        on_device: whether a call on an accelerator costs what its kernels take there, by events,
            with nothing of its arguments in the caches.
    """
    with contextlib.suppress(native.NativeUnavailableError):
        native.wait()  # while it is compiled, a call takes many times as long
    wait = _wait_for(arguments)
    device = _accelerator_of(arguments) if on_device else None
    a_round = _round if device is None else _device_rounds(device)
    rounds = {name: _rounds(a_round, way, wait, seconds) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, Exception] = {}
    for _ in range(_ROUNDS):
        for name in ways:
            try:  # a way that has raised, or has taken its time, yields nothing more
                times[name].extend(itertools.islice(rounds[name], 1))
            except Exception as error:
                errors[name] = error
    return {name: errors.get(name) or _timing(times[name]) for name in ways}


def _timing(times: list[float]) -> Timing:
    times = sorted(each * 1e6 for each in times)
    best, median = times[0], statistics.median(times)
    # The limits are order statistics, for which the times need no distribution.
    first = max(0, math.floor(len(times) / 2 - 0.98 * math.sqrt(len(times))))
    interval = times[first], times[-1 - first]
    return Timing(best, median - best if len(times) > 1 else math.inf, median, interval)


_Round = Callable[[Way, Callable[[], None], int], float]


def _rounds(a_round: _Round, way: Way, wait: Callable[[], None], seconds: float) -> Iterator[float]:
    """Yields what a call takes in each round."""
    first = math.inf
    for _ in range(3):  # the first call of all starts threads, and compiles kernels
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
    """What makes a round on an accelerator, where events are around each call."""
    # Writing it takes longer than starting a kernel, so the device does not wait for Python; and it
    # is larger than any cache.
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
    """Waits until the accelerator of the arguments has nothing left to do.

    One that is not used is not asked, because that would start it.
    """
    device = _accelerator_of(arguments)
    return lambda: None if device is None else torch.accelerator.synchronize(device)
