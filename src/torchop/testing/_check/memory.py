"""Checks of memory: the same values in other layouts and at other places."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchop.testing import probes
from torchop.testing._check.kinds import CheckKind, Details, family, variants
from torchop.testing._check.relations import has_fixed_values, referred
from torchop.testing._check.subject import CannotCheck, Case, Example, ForkError, Subject
from torchop.testing._check.variants import (
    WRITABLE,
    all_and_each,
    each_resized,
    in_layout,
    larger_sizes,
    sizes,
    sizes_changed,
)

# --------------------------------------------------------------------------------------------------
# Probes


def raises_nothing(op: Any, args: Any, kwargs: Any) -> None:
    """The operator can be called with the example."""
    op(*args, **kwargs)


def same_as_contiguous(
    op: Any, args: Any, kwargs: Any, expected: Any = None, what: str = "", **tolerances: Any
) -> None:
    """The call does the same as on contiguous copies, and writes nothing around its tensors."""
    if expected is None:
        expected = probes.outcome(op, *probes.contiguous_copies((args, kwargs)))
    with probes.memory_watched(op, args, kwargs, "the call"):
        actual = probes.outcome(op, args, kwargs)
        probes.assert_same(actual, expected, what or "the call", **tolerances)


def same_or_refused(op: Any, args: Any, kwargs: Any, what: str) -> None:
    """The call raises, or does the same as on arguments that share no memory."""
    expected = probes.outcome(op, *probes.contiguous_copies((args, kwargs)))
    try:
        actual = probes.outcome(op, args, kwargs)
    except Exception:
        return  # refused
    probes.assert_same(actual, expected, what)


def writes_every_element(
    op: Any, args: Any, kwargs: Any, rounds: int = 8, **tolerances: Any
) -> None:
    """The call leaves no element of its results as `torch.empty` made it."""
    before = torch.get_deterministic_debug_mode()
    # In this mode, torch.empty fills memory with NaN, and with the largest integer.
    torch.set_deterministic_debug_mode("warn")
    try:
        actual = probes.outcome_of_copies(op, args, kwargs)
    finally:
        torch.set_deterministic_debug_mode(before)
    kept = []  # so that the next call gets other memory
    for _ in range(rounds):
        probes.free_zeros(probes.tensors_of((args, kwargs, actual)))
        kept.append(probes.outcome_of_copies(op, args, kwargs))
        # PyTorch cannot compare the floating-point numbers of eight bits and less.
        tensors = map(probes.dense, probes.tensors_of(kept[-1]))
        floats = [t for t in tensors if t.is_floating_point() and t.itemsize > 1]
        if not any(bool(tensor.isnan().any()) for tensor in floats):
            break  # nothing looks as if it had not been written
    # Only now, because comparing leaves NaN in memory, which the next call would be given.
    for result in kept:
        probes.assert_same(actual, result, "with torch.empty filled with NaN", **tolerances)


# --------------------------------------------------------------------------------------------------
# Cases


def comparison(subject: Subject, label: str, example: Example, arrange: Any = None) -> Case:
    """The case that a call does what it does on contiguous copies."""
    options = functools.partial(subject.expectation, what=label)
    return Case(label, same_as_contiguous, example, arrange, options)


def passes(subject: Subject, example: Example, arrange: Any) -> bool:
    """Whether a call on arranged tensors does what it does on contiguous copies."""
    case = comparison(subject, "", example, arrange)
    with contextlib.suppress(Exception):
        call = case.call()
        if subject.refusal(call) is None:
            case.probe(subject.op, *call, **case.options_for(call))
            return True
    return False


def given(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do the same on the examples as on copies?"""
    for original in subject.originals:
        example = original.map(lambda tensor: tensor.detach())
        case = comparison(subject, "the example as it was passed", example)
        error = subject.refusal(example)
        if error is not None and not isinstance(error, ForkError):
            yield Case("the example", raises_nothing, example, calls=False, shrink=False)
        yield case


def _with_layout(layout: str, subject: Subject, details: Details) -> Iterator[Case]:
    """All tensors in one layout, then each alone."""
    problem = "no argument is a tensor"
    for example in subject.accepted():
        places = set(range(len(example.tensors)))
        if layout not in WRITABLE:
            places -= subject.written_places(example)
            if not places:
                problem = "every tensor is written, and may not be expanded"
                continue
        for chosen in all_and_each(places):
            label = f"{_which(subject.names(example), chosen, places)} {layout}"
            yield comparison(subject, label, example, in_layout(layout, chosen))
            if subject.schema.is_mutable:
                arrange = in_layout(layout, chosen, finite=True)
                yield comparison(subject, f"{label}, in memory of 3", example, arrange)
    raise CannotCheck(problem)


def _which(names: list[str], chosen: list[int], places: Collection[int]) -> str:
    if len(places) == 1:
        return "the tensor"
    return "all tensors" if len(chosen) == len(places) else names[chosen[0]]


def conjugate(subject: Subject, details: Details) -> Iterator[Case]:
    """The same on conjugate views?

    Complex copies are made where there is no complex tensor.
    """
    for example in subject.accepted():
        if not any(t.dtype.is_complex for t in example.tensors):
            # There is no complex dtype for what has eight bits.
            example = example.map(
                lambda t: t * (1 + 0.5j) if t.dtype.is_floating_point and t.itemsize > 1 else t
            )
            if not any(t.dtype.is_complex for t in example.tensors):
                continue
            if subject.refusal(example) is not None:
                continue
        yield comparison(subject, "conjugate views", example, in_layout("conjugate"))
    raise CannotCheck("no argument is complex, or may be")


def mixed(subject: Subject, details: Details) -> Iterator[Case]:
    """The same with another layout for each argument?"""
    chance, every = random.Random(subject.seed), (*WRITABLE, "expanded")
    for example in subject.accepted():
        places = range(len(example.tensors))
        if len(places) < 2:
            continue
        writable = subject.written_places(example)
        for _ in range(6):
            names = {p: chance.choice(WRITABLE if p in writable else every) for p in places}
            label = f"layouts {', '.join(names.values())}"
            yield comparison(subject, label, example, in_layout(names))
    raise CannotCheck("no call has two tensors")


def odd_strides(subject: Subject, details: Details) -> Iterator[Case]:
    """The same with odd strides of size 1?

    Size 1 is made where there is none.
    """
    for example in subject.accepted():
        for _, smaller in each_resized(
            example, {}, *({size: 1} for size in sizes(example)), subject=subject
        ):
            label = "dimensions of size 1 with odd strides"
            yield comparison(subject, label, smaller, in_layout("odd_strides"))


def _sized(size: int, subject: Subject, details: Details) -> Iterator[Case]:
    """All dimensions of one size, and those that were of one size, each for itself."""
    for example in subject.accepted():
        chosen = all_and_each([n for n in sizes(example) if n != size])
        changes = [dict.fromkeys(n, size) for n in chosen]
        yield from _of_sizes(subject, example, changes)
    raise CannotCheck("no tensor has a dimension")


def _of_sizes(
    subject: Subject, example: Example, changes: Iterable[Mapping[int, int]], compares: bool = True
) -> Iterator[Case]:
    """With other sizes, every element is written; then, if it `compares`, with what it has to be.

    In this order, as what is not written may also differ in two calls, which would say less.
    """

    def options(arranged: Example) -> dict[str, Any]:
        subject.expectation(arranged, "")  # which the reference may refuse
        return {"rounds": 2, **subject.tolerances}

    for change, other in each_resized(example, *changes, subject=subject):
        label, arrange = sizes_changed(change), in_layout("contiguous")
        if not subject.is_random:
            yield Case(label, writes_every_element, other, arrange, options)
        if compares:
            yield comparison(subject, label, other, arrange)


def zero_dim(subject: Subject, details: Details) -> Iterator[Case]:
    """The same on tensors without a dimension?"""
    for example in subject.accepted():
        tensors = example.tensors
        sized = [p for p, t in enumerate(tensors) if probes.is_plain(t) and t.dim() and t.numel()]
        places = [place for place in sized if not has_fixed_values(tensors[place], example)]
        places = sorted({*places} - referred(example))
        for chosen in all_and_each(places):
            changed = [t.flatten()[0].clone() if p in chosen else t for p, t in enumerate(tensors)]
            label = f"{_which(subject.names(example), chosen, places)} without a dimension"
            scalars = example.with_tensors(changed)
            yield comparison(subject, label, scalars, in_layout("offset", chosen))
    raise CannotCheck("no tensor has a dimension")


def written_expanded(subject: Subject, details: Details) -> Iterator[Case]:
    """Is writing into expanded tensors refused, or harmless?"""
    if not subject.schema.is_mutable:
        raise CannotCheck("nothing is written")
    for example in subject.accepted():
        arrange = in_layout("expanded", subject.written_places(example))
        options = {"what": "written into an expanded tensor, whose elements share memory"}
        label = "written tensors expanded"
        yield Case(label, same_or_refused, example, arrange, options, calls=False)


def uninitialized(subject: Subject, details: Details) -> Iterator[Case]:
    """Is every element of a result written?"""
    subject.needs_fixed_results()
    for example in subject.accepted():
        yield Case("torch.empty filled", writes_every_element, example, options=subject.tolerances)


def blocks(subject: Subject, details: Details) -> Iterator[Case]:
    """Is every element written where sizes are a little more than those of blocks?"""
    subject.needs_fixed_results()
    for example in subject.accepted(most=1):
        results = probes.tensors_of(subject.first_results(example))
        changes = larger_sizes(example, results=results)
        yield from _of_sizes(subject, example, changes, compares=subject.reference is not None)
    raise CannotCheck("no tensor has a dimension that may be larger")


_QUESTIONS = {
    "contiguous": "Does it read or write behind the end of a contiguous tensor?",
    "transposed": "Does it respect strides: the same on dense tensors that are not contiguous?",
    "gaps": "The same with gaps of NaN between elements?",
    "sliced": "The same on a slice of something larger?",
    "offset": "The same on tensors that do not start where their memory does?",
    "unaligned": "The same on memory that is not aligned to 16 bytes?",
    "channels_last": "The same on channels-last tensors?",
    "negative": "The same on negative views?",
    "expanded": "The same on expanded tensors, whose elements share memory?",
}
CHECKS = (
    *family("memory", given),
    *variants("memory", _QUESTIONS, _with_layout),
    *family("memory", conjugate, mixed),
    CheckKind("memory.empty", "The same with 0 elements?", functools.partial(_sized, 0)),
    CheckKind("memory.single", "The same with 1 element?", functools.partial(_sized, 1)),
    # Of what one element shows too, it would blame strides.
    *family("memory", odd_strides, zero_dim, written_expanded, uninitialized, blocks),
)
