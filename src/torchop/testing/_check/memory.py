"""Checks of memory: the same values in other layouts and at other places."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchop._rules.user.preconditions.base import with_size
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
    resized,
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
    tensors = probes.tensors_of((args, kwargs))
    writable = probes.written(probes.written_places(op), args, kwargs)
    with probes.memory_watched(tensors, writable, "the call"):
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


def counts_beyond_int32(op: Any, args: Any, kwargs: Any, elements: int = 2**31) -> None:
    """With more elements, in equal rows, the ends of results are those of a few rows."""
    tensors = probes.tensors_of((args, kwargs))
    count = elements // min(tensor[:1].numel() for tensor in tensors) + 8

    def rows(number: int) -> Any:
        return probes.mapped((args, kwargs), lambda t: t[:1].expand(number, *t.shape[1:]))

    few = probes.outcome(op, *rows(8))
    many = probes.outcome(op, *rows(count))
    for index, (one, other) in enumerate(zip(many, few, strict=True)):
        if isinstance(one, torch.Tensor) and one.dim() and one.shape[0] == count:
            ends, expected = [one[:4], one[-4:]], [other[:4], other[-4:]]
            probes.assert_same(ends, expected, f"the ends of result {index} of {count} rows")


def repeats_its_rows(
    op: Any, args: Any, kwargs: Any, size: int, new: int, **tolerances: Any
) -> None:
    """Where an input repeats its rows up to another size, a result repeats its own."""
    few = probes.outcome_of_copies(op, args, kwargs)
    actual = probes.outcome(op, *resized(Example(args, kwargs), {size: new}))

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            tensor = with_size(tensor, dim, new)
        return tensor

    expected = probes.mapped(few, repeated)
    probes.assert_same(actual, expected, f"with {new} in place of {size}", **tolerances)


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
        call, options = case.arguments()
        if subject.refusal(call) is None:
            case.probe(subject.op, *call, **options)
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
            label = f"{_which(chosen, places)} {layout}"
            yield comparison(subject, label, example, in_layout(layout, chosen))
            if subject.schema.is_mutable:
                arrange = in_layout(layout, chosen, finite=True)
                yield comparison(subject, f"{label}, in memory of 3", example, arrange)
    raise CannotCheck(problem)


def _which(chosen: list[int], places: Collection[int]) -> str:
    if len(places) == 1:
        return "the tensor"
    return "all tensors" if len(chosen) == len(places) else f"tensor {chosen[0]}"


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
            label = f"{_which(chosen, places)} without a dimension"
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


def large(subject: Subject, details: Details) -> Iterator[Case]:
    """The same with more than 2**31 elements? (Runs only if it is named.)

    The first dimension of each tensor is that long, expanded where it is read.
    """
    for example in subject.accepted(most=1):
        places = [p for p, t in enumerate(example.tensors) if t.dim() and t.numel()]
        if not places or subject.schema.is_mutable:
            raise CannotCheck("it writes, or no tensor has a dimension")
        lengths = {example.tensors[place].shape[0] for place in places}
        if len(lengths) > 1:
            raise CannotCheck("the first dimensions of its tensors differ")
        # Bytes, if it takes them: the results take a quarter of the memory.
        small = example.map(lambda t: (t * 10).to(torch.int8) if t.is_floating_point() else t)
        if subject.refusal(small) is None:
            example = small
        yield Case("more than 2**31 elements", counts_beyond_int32, example, shrink=False)


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


def many_rows(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do with many rows what it does with a few?

    It is asked only if a few more rows give what the same rows gave.
    """
    subject.needs_fixed_results()
    for example in subject.accepted(most=1):
        for size in sizes(example):
            # An odd number of rows, because 65,536 is a multiple of an even one.
            odd = {size: size - 1 if size > 2 else 3} if size % 2 == 0 else {}
            for change, smaller in each_resized(example, odd, {}, subject=subject):
                count = change.get(size, size)
                results = _repeated_results(subject, smaller, count) if count > 1 else []
                for larger in larger_sizes(smaller, results=results) if results else ():
                    if count in larger and subject.excluded(resized(smaller, larger)) is None:
                        options = {"size": count, "new": larger[count], **subject.tolerances}
                        label = sizes_changed(larger)
                        yield Case(label, repeats_its_rows, smaller, options=options)
                if results:
                    break
    raise CannotCheck("no result has a row for each row of the arguments")


def _repeated_results(subject: Subject, example: Example, size: int) -> list[torch.Tensor]:
    """The results of an example, if those of a few more rows repeat theirs; none otherwise."""
    if subject.refusal(example) is not None:
        return []
    args, kwargs = example
    results = probes.tensors_of(probes.outcome_of_copies(subject.op, args, kwargs))
    is_strided = all(t.layout is torch.strided for t in (*example.tensors, *results))
    if not is_strided or not any(size in result.shape for result in results):
        return []
    try:
        for new in (2 * size, 3 * size + 1):
            if subject.excluded(resized(example, {size: new})) is not None:
                return []
            repeats_its_rows(subject.op, args, kwargs, size, new, **subject.tolerances)
        for factor in (100, -100):
            _assert_rows_apart(subject, example, size, factor, **subject.tolerances)
    except Exception:
        return []
    return results


def _assert_rows_apart(
    subject: Subject, example: Example, size: int, factor: int, **tolerances: Any
) -> None:
    """Raises AssertionError if other values in the first of so many rows change other results."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            if tensor.is_floating_point():
                tensor.select(dim, 0).mul_(factor)
        return tensor

    def others(tensor: torch.Tensor) -> torch.Tensor:
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            tensor = tensor.narrow(dim, 1, size - 1)
        return tensor

    calls = example, example.map(changed)
    if subject.excluded(calls[1]) is not None:
        return
    outcomes = [probes.outcome_of_copies(subject.op, *call) for call in calls]
    first, again = (probes.mapped(outcome, others) for outcome in outcomes)
    probes.assert_same(again, first, "the other rows", **tolerances)


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
    *family("memory", odd_strides, zero_dim, written_expanded, uninitialized, blocks, many_rows),
    *family("memory", large, is_costly=True, on_request=True),
)
