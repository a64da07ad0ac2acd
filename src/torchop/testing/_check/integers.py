"""Checks of integers and scalars: integers of eight bits, special cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.memory import comparison
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject
from torchop.testing._check.values import with_numbers


def differ(actual: Any, expected: Any) -> bool:
    """Whether two outcomes are not the same, bit for bit."""
    try:
        probes.assert_same(actual, expected, "", rtol=0, atol=0)
    except AssertionError:
        return True
    return False


# --------------------------------------------------------------------------------------------------
# Cases


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
                label = f"{subject.names(example)[place]} full of limits"
                yield comparison(subject, label, changed)
    raise CannotCheck("no tensor holds integers of eight bits that are no indices")


def scalars(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do as the reference with other scalars?"""
    if subject.reference is None:
        raise CannotCheck("no reference says what is right")
    for example in subject.accepted():
        for label, other in with_other_scalars(subject, example):
            yield comparison(subject, label, other)
    raise CannotCheck("no argument is a number or a flag")


CHECKS = family("values", int8, scalars)
