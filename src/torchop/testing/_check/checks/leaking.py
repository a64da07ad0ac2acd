"""Check that calls leak neither memory nor other resources."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.gradients import trainable_example
from torchop.testing._check.layouts import in_layout
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import in_dtype
from torchop.testing.process_state import allocated_bytes, device_bytes, open_files
from torchop.testing.process_state import threads as count_threads


def leaks_nothing(
    call: Call, calls: int = 200, gradients: bool = False, others: Sequence[Any] = ()
) -> None:
    """Check that calls leak no Python objects, memory, files or threads.

    If `gradients` is true, each call also runs the backward pass. `others` contains the arguments
    of further calls to make.
    """
    given, also = call.example.copy(), [Example(*other).copy() for other in others]
    function, inputs = probes.as_function(call.op, *given)

    def once() -> None:
        if gradients:
            probes.gradients(function, inputs)
            return
        with torch.no_grad():
            for example in (given, *also):
                call.op(*example.args, **example.kwargs)

    # Memory also grows while calls fill a cache or a memory pool. So report a leak only if the same
    # counter grows in every run. By the later, longer runs, caches and pools should be full.
    leaking: set[str] = set()
    for run, each in enumerate((calls // 4, calls // 4, calls // 2, 2 * calls)):
        started = time.perf_counter()
        growths = _growths(once, each)
        leaking = leaking & growths.keys() if run else {*growths}
        if not leaking:
            return
        # Stop early if files or threads leak, because more calls could exceed the limits of the
        # process, or if this run was slow, because the next run makes at least as many calls.
        is_over = time.perf_counter() - started > _SECONDS_OF_RUN
        if run and (is_over or leaking & {"open files", "threads"}):
            break
    kept = {name: growth for name, growth in growths.items() if name in leaking}
    raise AssertionError(f"memory grows with every {each} calls: {kept}.")


_SECONDS_OF_RUN = 1.0


def _growths(call: Callable[[], None], each: int) -> dict[str, list[int]]:
    """Return the counters that indicate a leak, with their growth over every `each` calls.

    A counter indicates a leak if it grows by about the same amount every time.
    """
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    # The loop below runs a full garbage collection before it reads the counters, because only a
    # full collection clears CPython's free lists, which would otherwise look like a leak. Freeze
    # all existing objects first, so that these collections skip them and stay fast.
    gc.freeze()
    # Maps each counter to a function that reads it, and to the smallest growth per call that counts
    # as a leak.
    counters: dict[str, tuple[Callable[[], int], int]] = {
        "open files": (open_files, 1),
        "threads": (count_threads, 1),
        "Python objects": (sys.getallocatedblocks, 1),
        "bytes of memory": (allocated_bytes, 32),
        "bytes on the device": (device_bytes, 32),
    }
    counts: dict[str, list[int]] = {what: [] for what in counters}
    try:
        for _ in range(5):
            for _ in range(each):
                call()
            gc.collect()
            for what, (count, _) in counters.items():
                counts[what].append(count())
    finally:
        if not had_frozen:  # do not unfreeze objects that the program froze
            gc.unfreeze()
        if was_enabled:
            gc.enable()
    growths: dict[str, list[int]] = {}
    for what, (_, limit) in counters.items():
        growth = [after - before for before, after in itertools.pairwise(counts[what])][1:]
        # A leak grows by the same amount every time. A cache, for example in the backward thread,
        # grows less and less.
        if min(growth) >= limit * each and growth[-1] >= 0.8 * growth[0]:
            growths[what] = growth
    return growths


_LONGEST = 60  # the time limit in seconds for the repeated calls of `leaks`


def leaks(subject: Subject, details: Details) -> Iterator[Case]:
    """Do 200 calls leak nothing?"""
    if not allocated_bytes():
        details["memory"] = "only objects: the C library does not report allocated memory"
    for example in subject.accepted(most=1):
        started = time.perf_counter()
        subject.refusal(example)
        seconds = 250 * (time.perf_counter() - started)
        if seconds > _LONGEST:
            raise CannotCheck(f"200 calls of this example would take {seconds:.0f} s")
        yield Case("200 calls", example, probe=leaks_nothing, shrink=False)
        others = _others(subject, example)
        if others:
            label = "200 calls in other layouts and dtypes"
            options: dict[str, Any] = {"others": others[1:]}
            yield Case(label, others[0], probe=leaks_nothing, options=options, shrink=False)
        trainable = trainable_example(subject)
        if trainable is not None:
            label, options = "200 calls with backward", {"gradients": True}
            yield Case(label, trainable, None, "gradient", leaks_nothing, options, shrink=False)


def _others(subject: Subject, example: Example) -> list[Example]:
    """Return accepted calls in other layouts and dtypes, whose copies a kernel may fail to free."""
    arrangements: tuple[Any, ...] = (
        in_layout("sliced"),
        functools.partial(in_dtype, torch.double),
        functools.partial(in_dtype, torch.half),
    )
    found = []
    for arrange in arrangements:
        with contextlib.suppress(CannotCheck):
            other = arrange(example)
            if subject.refusal(other) is None:
                found.append(other)
    return found
