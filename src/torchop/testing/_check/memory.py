"""Checks of memory: the same values in other layouts and at other places."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchop.testing._check.kinds import CheckKind, Details
from torchop.testing._check.subject import CannotCheck, Case, Example, ForkError, Subject, reason
from torchop.testing._check.variants import LAYOUTS, WRITABLE, lay_out, resized, sizes
from torchop.testing.probes import (
    assert_same,
    contiguous_copies,
    copies,
    mapped,
    memory_around,
    outcome,
    tensors_of,
    written,
    written_places,
)

# --------------------------------------------------------------------------------------------------
# Probes


def same_as_contiguous(
    op: Any, args: Any, kwargs: Any, expected: Any = None, what: str = "", **tolerances: Any
) -> None:
    """The call does the same as on contiguous copies, and writes nothing around its tensors."""
    if expected is None:
        expected = outcome(op, *contiguous_copies((args, kwargs)))
    tensors, writable = tensors_of((args, kwargs)), written(written_places(op), args, kwargs)
    around = [memory_around(tensor, writable) for tensor in tensors]
    actual = outcome(op, args, kwargs)
    assert_same(actual, expected, what or "the call", **tolerances)
    for number, tensor in enumerate(tensors):
        if not torch.equal(memory_around(tensor, writable), around[number]):
            raise AssertionError(f"the call wrote into the memory around tensor {number}.")


def same_where_memory_is_shared(op: Any, args: Any, kwargs: Any) -> None:
    """A call that writes into expanded tensors raises, or writes one value to shared memory."""
    expected = outcome(op, *contiguous_copies((args, kwargs)))
    try:
        actual = outcome(op, args, kwargs)
    except Exception:
        return  # refused
    assert_same(actual, expected, "written into an expanded tensor, whose elements share memory")


def writes_every_element(op: Any, args: Any, kwargs: Any, **tolerances: Any) -> None:
    """The call leaves no element of its results as `torch.empty` made it."""
    before = torch.get_deterministic_debug_mode()
    # In this mode, torch.empty fills memory with NaN, and with the largest integer.
    torch.set_deterministic_debug_mode("warn")
    try:
        actual = outcome(op, *copies((args, kwargs)))
    finally:
        torch.set_deterministic_debug_mode(before)
    kept = []  # so that the next call gets other memory
    for _ in range(8):
        _free_zeros(tensors_of((args, kwargs, actual)))
        kept.append(outcome(op, *copies((args, kwargs))))
        if not any(map(_has_nan, tensors_of(kept[-1]))):
            break  # nothing looks as if it had not been written
    # Only now, because comparing leaves NaN in memory, which the next call would be given.
    for result in kept:
        assert_same(actual, result, "with torch.empty filled with NaN", **tolerances)


def _free_zeros(tensors: Sequence[torch.Tensor]) -> None:
    """Puts zeros where the next tensors of these sizes are likely to be: in memory that was freed.

    What was there may be NaN, and `torch.empty` would hand it on.
    """
    for tensor in tensors:
        size, count = tensor.nbytes, min(256, 2**24 // (tensor.nbytes + 1) + 2)
        zeros = [torch.zeros(size, dtype=torch.uint8, device=tensor.device) for _ in range(count)]
        del zeros


def _has_nan(tensor: torch.Tensor) -> bool:
    # PyTorch cannot compare the floating-point numbers of eight bits and less.
    return tensor.is_floating_point() and tensor.itemsize > 1 and bool(tensor.isnan().any())


def counts_beyond_int32(op: Any, args: Any, kwargs: Any, elements: int = 2**31) -> None:
    """With more elements, in equal rows, the ends of results are those of a few rows."""
    tensors = tensors_of((args, kwargs))
    count = elements // min(tensor[:1].numel() for tensor in tensors) + 8

    def rows(number: int) -> Any:
        return mapped((args, kwargs), lambda t: t[:1].expand(number, *t.shape[1:]))

    few = outcome(op, *rows(8))
    many = outcome(op, *rows(count))
    for index, (one, other) in enumerate(zip(many, few, strict=True)):
        if isinstance(one, torch.Tensor) and one.dim() and one.shape[0] == count:
            ends, expected = [one[:4], one[-4:]], [other[:4], other[-4:]]
            assert_same(ends, expected, f"the ends of result {index} of {count} rows")


# --------------------------------------------------------------------------------------------------
# Cases


def expectation(subject: Subject, example: Example, what: str = "") -> dict[str, Any]:
    """What a probe compares with: the user's reference where there is one."""
    options: dict[str, Any] = {"what": what} if what else {}
    options.update({k: v for k, v in subject.tolerances.items() if v is not None})
    if subject.is_random:
        options["values"] = False
    if subject.reference is not None:
        args, kwargs = contiguous_copies(tuple(example))
        try:
            result = outcome(subject.op, args, kwargs, subject.reference)
        except Exception as error:
            raise CannotCheck(f"the reference refuses it: {reason(error)}") from None
        options |= {"expected": [_detached(item) for item in result], "dtypes": False}
    return options


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def comparison(subject: Subject, label: str, example: Example, arrange: Any = None) -> Case:
    """The case that a call does what it does on contiguous copies."""
    return Case(
        label,
        same_as_contiguous,
        example,
        arrange or (lambda example: example),
        lambda arranged: expectation(subject, arranged, label),
    )


def _with_layout(layout: str, subject: Subject, details: Details) -> Iterator[Case]:
    """All tensors in one layout, then each alone."""
    problem: CannotCheck | None = None
    for example in subject.accepted():
        places = set(range(len(example.tensors)))
        if layout not in WRITABLE:
            places -= subject.written_places(example)
            if not places:
                problem = CannotCheck("every tensor is written, and may not be expanded")
                continue
        choices = [places, *({place} for place in sorted(places))] if len(places) > 1 else [places]
        for chosen in choices:
            arrange = functools.partial(lay_out, dict.fromkeys(chosen, layout))
            try:
                arrange(example)
            except CannotCheck as error:
                problem = error
                continue
            label = f"{_which(chosen, places)} {layout}"
            yield comparison(subject, label, example, arrange)
            if subject.schema.is_mutable:
                arrange = functools.partial(arrange, finite=True)
                yield comparison(subject, f"{label}, in memory of 3", example, arrange)
    raise problem or CannotCheck("no argument is a tensor")


def _which(chosen: set[int], places: set[int]) -> str:
    if len(places) == 1:
        return "the tensor"
    if chosen == places:
        return "all tensors"
    return f"tensor {min(chosen)}"


def _mixed(subject: Subject, details: Details) -> Iterator[Case]:
    """Layouts by chance, another one for each tensor."""
    chance = random.Random(subject.seed)
    for example in subject.accepted():
        places = range(len(example.tensors))
        if len(places) < 2:
            continue
        writable = subject.written_places(example)
        for _ in range(6):
            names = {
                p: chance.choice(WRITABLE if p in writable else tuple(LAYOUTS)) for p in places
            }
            arrange = functools.partial(lay_out, names)
            try:
                arrange(example)
            except CannotCheck:
                continue
            yield comparison(subject, f"layouts {', '.join(names.values())}", example, arrange)
    raise CannotCheck("no call has two tensors")


def _as_given(subject: Subject, details: Details) -> Iterator[Case]:
    """The examples as they were passed."""
    for original in subject.originals:
        example = original.map(lambda tensor: tensor.detach())
        case = comparison(subject, "the example as it was passed", example)
        error = subject.refusal(example)
        if error is not None and not isinstance(error, ForkError):
            yield Case("the example", raises_nothing, example, calls=False, shrink=False)
        yield case


def raises_nothing(op: Any, args: Any, kwargs: Any) -> None:
    """The operator can be called with the example."""
    op(*args, **kwargs)


def _sized(size: int, subject: Subject, details: Details) -> Iterator[Case]:
    """All dimensions of one size, and those that were of one size, each for itself."""
    for example in subject.accepted():
        all_sizes = [n for n in sizes(example) if n != size]
        changes = [{n: size} for n in all_sizes]
        if len(all_sizes) > 1:
            changes.insert(0, dict.fromkeys(all_sizes, size))
        for change in changes:
            smaller = resized(example, change)
            places = range(len(smaller.tensors))
            layouts = dict.fromkeys(places, "contiguous")
            label = ", ".join(f"dimensions of {n} with {size}" for n in change)
            arrange = functools.partial(lay_out, layouts)
            yield comparison(subject, label, smaller, arrange)
    raise CannotCheck("no tensor has a dimension")


def _zero_dim(subject: Subject, details: Details) -> Iterator[Case]:
    """Tensors of no dimension: all, then each alone."""
    for example in subject.accepted():
        tensors = example.tensors
        places = [p for p, t in enumerate(tensors) if t.dim() and t.numel()]
        for chosen in [places, *([p] for p in places if len(places) > 1)]:
            if chosen:
                changed = [
                    t.flatten()[0].clone() if p in chosen else t for p, t in enumerate(tensors)
                ]
                yield comparison(
                    subject,
                    f"{_which(set(chosen), set(places))} without a dimension",
                    example.with_tensors(changed),
                    functools.partial(lay_out, dict.fromkeys(chosen, "offset")),
                )
    raise CannotCheck("no tensor has a dimension")


def _odd_strides(subject: Subject, details: Details) -> Iterator[Case]:
    """Size 1 is made where there is none."""
    for example in subject.accepted():
        for size in (None, *sizes(example)):
            smaller = example if size is None else resized(example, {size: 1})
            arrange = functools.partial(
                lay_out, dict.fromkeys(range(len(smaller.tensors)), "odd_strides")
            )
            try:
                arrange(smaller)
            except CannotCheck:
                continue
            yield comparison(subject, "dimensions of size 1 with odd strides", smaller, arrange)


def _conjugate(subject: Subject, details: Details) -> Iterator[Case]:
    """Complex copies are made where there is no complex tensor."""
    for example in subject.accepted():
        places = range(len(example.tensors))
        arrange = functools.partial(lay_out, dict.fromkeys(places, "conjugate"))
        if not any(t.dtype.is_complex for t in example.tensors):
            # There is no complex dtype for what has eight bits.
            example = example.map(
                lambda t: t * (1 + 0.5j) if t.dtype.is_floating_point and t.itemsize > 1 else t
            )
            if not any(t.dtype.is_complex for t in example.tensors):
                continue
            error = subject.refusal(example)
            if error is not None:
                continue
        yield comparison(subject, "conjugate views", example, arrange)
    raise CannotCheck("no argument is complex, or may be")


def _written_expanded(subject: Subject, details: Details) -> Iterator[Case]:
    """What is written is expanded."""
    if not subject.schema.is_mutable:
        raise CannotCheck("nothing is written")
    for example in subject.accepted():
        places = subject.written_places(example)
        arrange = functools.partial(lay_out, dict.fromkeys(places, "expanded"))
        arrange(example)
        yield Case(
            "written tensors expanded",
            same_where_memory_is_shared,
            example,
            arrange,
            calls=False,
        )


def _large(subject: Subject, details: Details) -> Iterator[Case]:
    """More than 2**31 elements: the first dimension of each tensor, expanded where it is read."""
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


def _uninitialized(subject: Subject, details: Details) -> Iterator[Case]:
    """Memory that the kernel asked for and did not write."""
    if subject.is_random:
        raise CannotCheck("its results are random")
    tolerances = {k: v for k, v in subject.tolerances.items() if v is not None}
    for example in subject.accepted():
        yield Case("torch.empty filled", writes_every_element, example, options=tolerances)


_LAYOUT_QUESTIONS = {
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
    CheckKind("memory.given", "Does it do the same on the examples as on copies?", _as_given),
    *(
        CheckKind(f"memory.{layout}", question, functools.partial(_with_layout, layout))
        for layout, question in _LAYOUT_QUESTIONS.items()
    ),
    CheckKind("memory.conjugate", "The same on conjugate views?", _conjugate),
    CheckKind("memory.mixed", "The same with another layout for each argument?", _mixed),
    CheckKind("memory.odd_strides", "The same with odd strides of size 1?", _odd_strides),
    CheckKind("memory.empty", "The same with 0 elements?", functools.partial(_sized, 0)),
    CheckKind("memory.single", "The same with 1 element?", functools.partial(_sized, 1)),
    CheckKind("memory.zero_dim", "The same on tensors without a dimension?", _zero_dim),
    CheckKind(
        "memory.written_expanded",
        "Is writing into expanded tensors refused, or harmless?",
        _written_expanded,
    ),
    CheckKind(
        "memory.large",
        "The same with more than 2**31 elements? (Runs only if it is named.)",
        _large,
        is_costly=True,
        on_request=True,
    ),
    CheckKind("memory.uninitialized", "Is every element of a result written?", _uninitialized),
)
