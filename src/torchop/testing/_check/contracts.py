"""Checks of what an operator promises beside its result: what it writes, keeps and leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchop.testing import probes
from torchop.testing._check.integers import (
    differ,
    with_other_scalars,
)
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.subject import CannotCheck, Case, Example, ForkError, Subject
from torchop.testing._check.subsystems.gradients import trainable_example
from torchop.testing._check.variants import (
    each_resized,
    in_layout,
    sizes,
    sizes_changed,
)
from torchop.testing._opcheck import opcheck
from torchop.testing.process_state import (
    allocated_bytes,
    device_bytes,
    forks,
    generator_states,
    is_of_generator,
    open_files,
    process_state,
    seed_all,
    threads,
)

# Seconds that the calls which look for leaks may take.
_LONGEST = 60

# --------------------------------------------------------------------------------------------------
# Probes


def is_repeatable(op: Any, args: Any, kwargs: Any, first: Any = None) -> None:
    """Equal calls give equal results, bit for bit: at least 5, and up to 300 in 0.3 seconds.

    `first` is what the first call of the process returned, if it was not made here.
    """
    expected = probes.outcome_of_copies(op, args, kwargs) if first is None else first
    end = time.perf_counter() + 0.3
    for number in range(2, 301):
        again = probes.outcome_of_copies(op, args, kwargs)
        what = f"call {number} with the same arguments"
        probes.assert_same(again, expected, what, rtol=0, atol=0)
        if number > 5 and time.perf_counter() > end:
            break


def draws_from_its_generator(op: Any, args: Any, kwargs: Any) -> None:
    """Where a generator is passed, no other one decides what the results are."""
    drawn = []
    for seed in (1, 2):
        call_args, call_kwargs = probes.copies((args, kwargs))
        seed_all(seed)
        drawn.append(probes.leaves(op(*call_args, **call_kwargs)))
    what = "equal generators, and another seed of PyTorch's own"
    probes.assert_same(drawn[1], drawn[0], what, rtol=0, atol=0)


def draws_anew(op: Any, args: Any, kwargs: Any) -> None:
    """Another seed changes what is drawn, or the state of a generator tells that something is."""
    results = []
    for seed in range(16):
        call_args, call_kwargs = probes.copies((args, kwargs))
        seed_all(seed)
        before = generator_states()
        results.append(probes.leaves(op(*call_args, **call_kwargs)))
        if generator_states() != before or differ(results[-1], results[0]):
            return
    raise AssertionError(
        "16 seeds give the same results, and no generator is drawn from, which the tag "
        "torch.Tag.nondeterministic_seeded promises. Draw from PyTorch's generator, or from one "
        "that is seeded from it."
    )


def has_no_memory(op: Any, args: Any, kwargs: Any, others: Any) -> None:
    """A call gives the same results whatever was called before."""
    first = probes.outcome_of_copies(op, args, kwargs)
    each = [(f"another one ({number})", [call]) for number, call in enumerate(others)]
    for what, calls in [*each, ("several others", others)]:
        for other_args, other_kwargs in calls:
            with contextlib.suppress(Exception):  # refused, which must change nothing either
                probes.outcome_of_copies(op, other_args, other_kwargs)
        again = probes.outcome_of_copies(op, args, kwargs)
        probes.assert_same(again, first, f"the same call after {what}", rtol=0, atol=0)
    # The same tensors with other values, and then these values in other memory.
    same = probes.copies((args, kwargs))
    probes.outcome(op, *same)
    probes.mapped(same, lambda t: t.mul_(-2) if t.is_floating_point() else t)
    elsewhere = [probes.copies(same) for _ in range(32)]  # few where an earlier call was
    try:
        here, *there = (probes.outcome(op, *call) for call in (same, *elsewhere))
    except Exception:
        return  # other values are refused
    for each in there:
        probes.assert_same(here, each, "other values at the same address", rtol=0, atol=0)


def keeps_no_input(op: Any, args: Any, kwargs: Any) -> None:
    """Nothing holds the memory of the arguments after the call."""
    names = iter(probes.argument_names(op, args, kwargs))
    watched = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        name, copy = next(names), tensor.detach().clone()
        if tensor.layout is torch.strided and tensor.numel():
            watched.append((name, StorageWeakRef(copy.untyped_storage())))
        return copy

    call_args, call_kwargs = probes.mapped((args, kwargs), copied)
    with torch.no_grad():
        probes.outcome(op, call_args, call_kwargs)
    del call_args, call_kwargs
    if not all(memory.expired() for _, memory in watched):
        gc.collect()
    alive = [name for name, memory in watched if not memory.expired()]
    if alive:
        raise AssertionError(f"after the call, something still holds the memory of {alive[0]}.")


def leaks_nothing(
    op: Any, args: Any, kwargs: Any, calls: int = 200, gradients: bool = False
) -> None:
    """Calls, or calls with backward, leave neither Python objects nor memory behind."""
    call_args, call_kwargs = probes.copies((args, kwargs))
    function, inputs = probes.as_function(op, call_args, call_kwargs)

    def call() -> None:
        if gradients:
            probes.gradients(function, inputs)
            return
        with torch.no_grad():
            op(*call_args, **call_kwargs)

    # A large process also fills what it keeps for later, so only what grows again is a leak.
    if _growths(call, calls // 4) and (growths := _growths(call, calls // 4)):
        raise AssertionError(f"each {calls // 4} calls leave more behind: {growths}.")


def _growths(call: Callable[[], None], each: int) -> dict[str, list[int]]:
    """What grew in every one of four windows of calls, the first apart, and by how much in each."""
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    # Only a full collection frees the tuples that Python keeps for later, up to 2,000 of each
    # length. It is quick, as it need not look at the objects that were there before.
    gc.freeze()
    # What is counted, and how many more of it, for each call, are a leak.
    counters: dict[str, tuple[Callable[[], int], int]] = {
        "open files": (open_files, 1),
        "threads": (threads, 1),
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
        if not had_frozen:  # what others have frozen on purpose stays frozen
            gc.unfreeze()
        if was_enabled:
            gc.enable()
    growths: dict[str, list[int]] = {}
    for what, (_, limit) in counters.items():
        growth = [after - before for before, after in itertools.pairwise(counts[what])][1:]
        # Each call of a leak leaves as much behind. What a process keeps for later, as when a
        # backward first runs in its thread, gets less with every window.
        if min(growth) >= limit * each and growth[-1] >= 0.8 * growth[0]:
            growths[what] = growth
    return growths


def leaves_process_alone(op: Any, args: Any, kwargs: Any, draws: bool = False) -> None:
    """The call changes no default, no mode, no environment, and, unless it draws, no generator."""
    seed_all(20010)  # which no kernel sets, as no number of threads
    torch.set_num_threads(7)
    process, forked = os.getpid(), forks()
    with torch.enable_grad(), warnings.catch_warnings():
        # One that no kernel sets again, and with which a warning is not shown.
        warnings.filterwarnings("ignore", ".*")
        before = process_state()
        op(*args, **kwargs)
        if os.getpid() != process:
            os._exit(1)  # this is a copy of the process
        after = process_state()
    if forks() != forked:
        raise AssertionError(
            "the call forks the process, and the copy, which lacks PyTorch's threads, goes on with "
            "the program if it returns from the call."
        )
    for name, value in before.items():
        if after[name] == value:
            continue
        if is_of_generator(name):
            if draws:
                continue
            raise AssertionError(
                f"the call changes {name}. An operator that draws random numbers has the tag "
                "torch.Tag.nondeterministic_seeded, and no operator seeds a generator that others "
                "use."
            )
        is_long = isinstance(value, list | dict)
        values = "" if is_long else f" from {value} to {after[name]}"
        raise AssertionError(f"the call changes {name}{values}, which other code relies on.")


# --------------------------------------------------------------------------------------------------
# Cases


def schema(subject: Subject, details: Details) -> Iterator[Case]:
    """Are only the named arguments written, and are outputs fresh, also through NumPy?"""
    check = functools.partial(Case, probe=opcheck, options={"test_utils": "test_schema"})
    for original in subject.originals:
        example = original.map(lambda tensor: tensor.detach())
        yield check("the example as it was passed", example=example)
    for example in subject.accepted():
        for layout in ("contiguous", "transposed", "sliced"):
            yield check(f"tensors {layout}", example=example, arrange=in_layout(layout))
        changes = [{size: new} for size in sizes(example) for new in (0, 1) if new != size]
        for change, smaller in each_resized(example, *changes, subject=subject):
            yield check(sizes_changed(change), example=smaller)
        for label, other in with_other_scalars(subject, example):
            yield check(label, example=other)


def repeated(subject: Subject, details: Details) -> Iterator[Case]:
    """Do equal calls give equal results?"""
    for example in subject.accepted():
        yield Case("repeated calls", is_repeatable, example)
        first = {"first": subject.first_results(example)}
        yield Case("the first call", is_repeatable, example, options=first, shrink=False)
        arguments = (*example.args, *example.kwargs.values())
        # Numbers with which nothing may be drawn, as where nothing is dropped.
        is_off = any(value in (0, 1) for value in arguments if type(value) in (int, float, bool))
        if any(isinstance(argument, torch.Generator) for argument in arguments):
            yield Case("two equal generators", draws_from_its_generator, example)
        elif subject.is_random and not is_off and any(t.numel() for t in example.tensors):
            yield Case("other seeds", draws_anew, example, shrink=False)


def state(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a call give the same results after other calls?"""
    examples = subject.accepted(most=8)
    for index, example in enumerate(examples[:3]):
        options = functools.partial(_others, subject, [*examples[:index], *examples[index + 1 :]])
        yield Case("other calls between two equal ones", has_no_memory, example, options=options)


def _others(subject: Subject, examples: list[Example], arranged: Example) -> dict[str, Any]:
    """Other calls than one: with other values, other sizes, and other examples."""
    changes = [{size: size + 1} for size in sizes(arranged)[:2] if size]
    others = [
        *examples[:2],
        *(larger for _, larger in each_resized(arranged, *changes)),
        Example(*probes.other_values(tuple(arranged))),
        arranged.map(lambda t: 3 * t + 1 if probes.is_plain(t) and t.is_floating_point() else t),
        arranged.map(lambda t: -2 * t if _is_float(t) else t),
    ]
    return {"others": [tuple(other) for other in others if subject.is_valid(other)]}


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point


def kept(subject: Subject, details: Details) -> Iterator[Case]:
    """Is the memory of arguments given back?"""
    for example in subject.accepted():
        if not any(t.numel() for t in example.tensors):
            continue
        yield Case("the memory of the arguments", keeps_no_input, example, shrink=False)


def leaks(subject: Subject, details: Details) -> Iterator[Case]:
    """Do 200 calls leave nothing behind?"""
    if not allocated_bytes():
        details["memory"] = "only objects: the C library does not say how much is allocated"
    for example in subject.accepted(most=1):
        started = time.perf_counter()
        subject.refusal(example)
        seconds = 250 * (time.perf_counter() - started)
        if seconds > _LONGEST:
            raise CannotCheck(f"200 calls of this example would take {seconds:.0f} s")
        yield Case("200 calls", leaks_nothing, example, shrink=False)
        trainable = trainable_example(subject)
        if trainable is not None:
            label, options = "200 calls with backward", {"gradients": True}
            yield Case(label, leaks_nothing, trainable, options=options, shrink=False)


def process(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a call leave defaults, modes, generators and the environment unchanged?"""
    options = {"draws": True} if subject.is_random else {}
    check = functools.partial(Case, probe=leaves_process_alone, options=options)
    examples = subject.examples[:3]
    if isinstance(subject.refusal(examples[0]), ForkError):
        yield check("the example", example=examples[0], calls=False, shrink=False)
    for example in examples:
        yield check("the example", example=example)


CHECKS = family("contracts", schema, repeated, state, kept, leaks, process)
