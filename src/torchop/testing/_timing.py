"""What calls cost, timed in turns: for the report of `check`, for `bench` and for recordings."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchop import NativeUnavailableError, native
from torchop.testing.probes import tensors_of

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


def timed(ways: Mapping[str, Way], arguments: Any, seconds: float) -> dict[str, Timing | Exception]:
    """Times several ways to make a call, or says what a way raises.

    They take turns, so that what slows the machine down slows all of them. On an accelerator, which
    runs asynchronously, a call costs what it takes to start it.

    Args:
        ways: what to time, by name.
        arguments: of the call, whose tensors tell whether an accelerator has to be waited for.
        seconds: how long to time each way, unless one call takes longer.
    """
    with contextlib.suppress(NativeUnavailableError):
        native.wait()  # while it is compiled, a call takes many times as long
    wait = _wait_for(arguments)
    rounds = {name: _rounds(way, wait, seconds) for name, way in ways.items()}
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
    best = min(times)
    noise = statistics.median(times) - best if len(times) > 1 else math.inf
    return Timing(best * 1e6, noise * 1e6)


def _rounds(way: Way, wait: Callable[[], None], seconds: float) -> Iterator[float]:
    """Yields what a call takes in each round."""
    first = math.inf
    for _ in range(3):  # the first call of all starts threads, and compiles kernels
        first = max(1e-7, min(first, _round(way, wait, 1)))
        if first > seconds:
            break
    calls = max(1, min(_MOST_CALLS, int(seconds / _ROUNDS / first)))
    for _ in range(max(1, int(seconds / calls / first))):
        yield _round(way, wait, calls)


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


def _wait_for(arguments: Any) -> Callable[[], None]:
    """Waits until the accelerator of the arguments has nothing left to do.

    One that is not used is not asked, because that would start it.
    """
    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors_of(arguments)):
        return torch.accelerator.synchronize
    return lambda: None
