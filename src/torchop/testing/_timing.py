"""Time several calls in alternating rounds, so that a slowdown affects all of them equally."""

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

_ROUNDS, _MOST_CALLS = 15, 100  # the number of rounds, and the largest number of calls per round
_LEAD_IN = 3  # untimed warm-up calls before each round


class Way(NamedTuple):
    """A call to time, for example with one of an operator's alternative kernels.

    For each round, `make` prepares the arguments and returns a function without parameters that
    makes the call. `mode` returns a context manager for the round, such as `torch.no_grad()`.
    """

    make: Callable[[], Callable[[], Any]]
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Timing(NamedTuple):
    """The time that a call takes, in microseconds."""

    best: float  # the fastest round, as in timeit, because other processes only slow calls down
    noise: float  # the median minus `best`, or infinity if there was only one round
    median: float  # the median of all rounds
    interval: tuple[float, float]  # the 95 % confidence interval of the median


def way(
    function: Callable[..., Any],
    schema: Schema,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Way:
    """Return a `Way` that calls `function` inside `mode`.

    If the operator mutates its arguments, each round starts from fresh copies. Updating the same
    values in every round could make them overflow to infinity, and arithmetic with infinity can be
    slower.
    """

    def make() -> Callable[[], Any]:
        args, kwargs = inside_a_graph(schema, *copies(call)) if schema.is_mutable else call
        return functools.partial(function, *args, **kwargs)

    return Way(make, mode)


def timed(
    ways: Mapping[str, Way], arguments: Any, seconds: float, *, on_device: bool = False
) -> dict[str, Timing | Exception]:
    """Time several calls in alternation, and return the timing of each call.

    If a call raises, the result contains the exception instead of a timing. Each entry of `ways` is
    timed for at most `seconds`, unless a single call takes longer.

    By default, the clock stops when the call returns, so on an accelerator it only measures how
    long it takes to launch the kernels. With `on_device=True`, time the kernels themselves on the
    accelerator that holds `arguments`, with cold caches.
    """
    with contextlib.suppress(native.NativeUnavailableError):
        native.wait()  # calls are slower until the C++ extension has been built and loaded
    wait = _wait_for(arguments)
    device = _accelerator_of(arguments) if on_device else None
    a_round = _round if device is None else _device_rounds(device)
    rounds = {name: _rounds(a_round, way, wait, seconds) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, Exception] = {}
    for _ in range(_ROUNDS):
        for name in ways:
            try:  # after an exception or the time limit, the generator yields nothing more
                times[name].extend(itertools.islice(rounds[name], 1))
            except Exception as error:
                errors[name] = error
    return {name: errors.get(name) or _timing(times[name]) for name in ways}


def _timing(times: list[float]) -> Timing:
    times = sorted(each * 1e6 for each in times)
    best, median = times[0], statistics.median(times)
    # Use order statistics, because they give a confidence interval for the median without assuming
    # a distribution.
    first = max(0, math.floor(len(times) / 2 - 0.98 * math.sqrt(len(times))))
    interval = times[first], times[-1 - first]
    return Timing(best, median - best if len(times) > 1 else math.inf, median, interval)


_Round = Callable[[Way, Callable[[], None], int], float]


def _rounds(a_round: _Round, way: Way, wait: Callable[[], None], seconds: float) -> Iterator[float]:
    """Run rounds until the time limit, and yield the seconds per call after each round."""
    first = math.inf
    # Estimate how long a call takes. The very first call may start threads or compile kernels, so
    # use the fastest of three calls.
    for _ in range(3):
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
    """Return a function that runs one round and times each call with accelerator events."""
    # The tensor is larger than any cache, so filling it evicts the arguments from the caches. It
    # also keeps the device busy for longer than Python needs to launch the call, so the device
    # never waits for Python between the two events.
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
    """Return a function that synchronizes with the accelerator of the arguments.

    If no argument is on an accelerator, the function is a no-op, because synchronizing an unused
    accelerator would initialize it.
    """
    device = _accelerator_of(arguments)
    return lambda: None if device is None else torch.accelerator.synchronize(device)
