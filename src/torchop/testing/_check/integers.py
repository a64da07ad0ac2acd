"""Checks of integers and scalars: more than 32 bits, negative dimensions, special cases."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.memory import comparison
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject
from torchop.testing._check.values import with_numbers

_DIMENSION_NAMES = ("dim", "dims", "axis", "axes")

# --------------------------------------------------------------------------------------------------
# Probes


def keeps_64_bits(op: Any, args: Any, kwargs: Any, place: int | str) -> None:
    """Integers that are 2**32 apart are not taken for the same.

    Only where those that are 2**31 apart give different results: others may take a few bits on
    purpose, or do not matter.
    """
    example = Example(args, kwargs)
    plain = probes.outcome(op, *_raised(example, place, 0))
    try:
        near, far = (probes.outcome(op, *_raised(example, place, by)) for by in (2**31, 2**32))
    except Exception:
        return  # refused
    if differ(near, plain) and not differ(far, plain):
        raise AssertionError(
            f"{_named(place)}: integers that are 2**32 apart give the same result, but those that "
            "are 2**31 apart do not. The kernel keeps 32 of their 64 bits; take int64_t, or refuse "
            "what is too large."
        )


def counts_dimensions_from_the_end(
    op: Any, args: Any, kwargs: Any, name: str, negative: Any
) -> None:
    """A negative dimension is refused, or is the one that it is for PyTorch."""
    expected = probes.outcome_of_copies(op, args, kwargs)
    try:
        actual = probes.outcome_of_copies(op, args, {**kwargs, name: negative})
    except Exception:
        return  # refused
    probes.assert_same(actual, expected, f"{name}={negative} in place of {kwargs[name]}")


def differ(actual: Any, expected: Any) -> bool:
    """Whether two outcomes are not the same, bit for bit."""
    try:
        probes.assert_same(actual, expected, "", rtol=0, atol=0)
    except AssertionError:
        return True
    return False


def _named(place: int | str) -> str:
    return f"tensor {place}" if isinstance(place, int) else f"the argument {place}"


def _raised(example: Example, place: int | str, by: int) -> Example:
    """The example with so much more in one tensor, or in an argument that is passed by name."""
    example = example.copy()
    if isinstance(place, int):
        return example.replace(place, example.tensors[place] + by)
    return with_argument(example, place, example.kwargs[place] + by)


# --------------------------------------------------------------------------------------------------
# Cases


def int32(subject: Subject, details: Details) -> Iterator[Case]:
    """Are all 64 bits of an integer used?"""
    subject.needs_fixed_results()
    for example in subject.accepted(most=2):
        if subject.schema.is_mutable:
            raise CannotCheck("it writes into its arguments")
        named = by_name(subject, example)
        results = probes.tensors_of(subject.first_results(example))
        places: list[int | str] = [
            place
            for place, tensor in enumerate(named.tensors)
            if tensor.dtype is torch.int64 and not may_be_places(tensor, [*named.tensors, *results])
        ]
        places += [
            name
            for name, value in named.kwargs.items()
            if type(value) is int
            and name not in _DIMENSION_NAMES
            and not may_be_places(torch.tensor(value), [*named.tensors, *results])
            and _costs_no_more(subject, named, name)
        ]
        for place in places:
            if subject.excluded(_raised(named, place, 2**32)) is not None:
                continue
            label = f"{_named(place)} beyond 32 bits"
            yield Case(label, keeps_64_bits, named, options={"place": place})
    raise CannotCheck("no argument is an integer that may be large")


def by_name(subject: Subject, example: Example) -> Example:
    """The example with all of its arguments by name."""
    names = (argument.name for argument in subject.schema.arguments)
    return Example((), {**dict(zip(names, example.args, strict=False)), **example.kwargs})


def with_argument(example: Example, name: str, value: Any) -> Example:
    """The example with another value for an argument that is passed by name."""
    return Example(example.args, {**example.kwargs, name: value})


def with_other_scalars(subject: Subject, example: Example) -> Iterator[tuple[str, Example]]:
    """The example with another scalar in place of one of its own, and words for it.

    These are 0, 1 and flags the other way around, for which kernels have special cases, and a
    number that is not whole.
    """
    named = by_name(subject, example)
    for name, value in named.kwargs.items():
        others: set[Any] = set()
        if type(value) is bool:
            others = {not value}
        elif type(value) is float:
            others = {0.0, 1.0, value + 0.5} - {value}
        elif type(value) is int and subject.operator.function is not None:
            # In C++, it may rely on integers that fit, and anywhere on a number above all indices.
            indices = filter(probes.has_integers, named.tensors)
            is_bound = any(int(t.min()) >= 0 and int(t.max()) < value for t in indices)
            others = {value + 1} if is_bound else {0, -1, value + 1} - {value}
        for other in sorted(others):
            yield f"{name}={other}", with_argument(named, name, other)


def may_be_places(integers: Tensor, tensors: list[Tensor]) -> bool:
    """Whether integers could be places in one of these tensors, or sizes of their parts.

    A permutation has places in itself, and ranges of some lengths are places in a result.
    """
    most = max((tensor.numel() for tensor in tensors), default=0)
    return bool(((integers >= 0) & (integers <= most)).all())


def _costs_no_more(subject: Subject, example: Example, name: str) -> bool:
    """Whether a call with a larger integer takes no longer: it counts no elements, no rounds."""

    def seconds(by: int) -> float:
        started = time.perf_counter()
        error = subject.refusal(_raised(example, name, by))
        return math.inf if error is not None else time.perf_counter() - started

    most = 4 * min(seconds(0) for _ in range(3)) + 0.001
    # Each step only after the one before, as it may take 16 times as long.
    return all(any(seconds(by) < most for _ in range(3)) for by in (2**12, 2**16, 2**20, 2**24))


def negative_dim(subject: Subject, details: Details) -> Iterator[Case]:
    """Is a negative dimension refused, or counted from the last one?"""
    subject.needs_fixed_results()
    for example in subject.accepted():
        named = by_name(subject, example)
        for name, value in named.kwargs.items():
            if name not in _DIMENSION_NAMES or not named.tensors:
                continue
            count = named.tensors[0].dim()
            dims = value if isinstance(value, list) else [value]
            if dims and all(type(dim) is int and 0 <= dim < count for dim in dims):
                turned = [dim - count for dim in dims]
                negative = turned if isinstance(value, list) else turned[0]
                if subject.excluded(with_argument(named, name, negative)) is not None:
                    continue
                options = {"name": name, "negative": negative}
                label = f"{name}={negative}"
                yield Case(label, counts_dimensions_from_the_end, named, options=options)
    raise CannotCheck(f"no argument is called {' or '.join(_DIMENSION_NAMES)} and is 0 or more")


def int8(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do as the reference with the smallest and the largest integers of eight bits?"""
    if subject.reference is None:
        raise CannotCheck("no reference says what is right")
    for example in subject.accepted():
        for place, tensor in enumerate(example.tensors):
            if tensor.dtype in (torch.int8, torch.uint8) and not may_be_places(
                tensor, example.tensors
            ):
                limits = torch.iinfo(tensor.dtype)
                numbers = [limits.min, limits.max, 0]
                changed = example.replace(place, with_numbers(numbers, 1, tensor))
                yield comparison(subject, f"tensor {place} full of limits", changed)
    raise CannotCheck("no tensor holds integers of eight bits that are no indices")


def scalars(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do as the reference with other scalars?"""
    if subject.reference is None:
        raise CannotCheck("no reference says what is right")
    for example in subject.accepted():
        for label, other in with_other_scalars(subject, example):
            yield comparison(subject, label, other)
    raise CannotCheck("no argument is a number or a flag")


CHECKS = family("values", int32, int8, negative_dim, scalars)
