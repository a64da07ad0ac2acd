"""What integers among the arguments say of others: offsets, lengths, indices, sorted values.

An operator may rely on such a relation without a test, so a variant of an example that breaks it
shows nothing. Where the author has not declared them, they are recognised from the example alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop._rules.user.preconditions.base import Arguments, Precondition, Unfit
from torchop._rules.user.preconditions.relations import Related
from torchop.preconditions import Indices, Lengths, Offsets, Sorted
from torchop.testing._check.subject import Example
from torchop.testing.probes import has_integers, is_plain, is_sorted


def has_fixed_values(tensor: Tensor, example: Example) -> bool:
    """Whether integers may not all be equal: they are sorted, lengths, or a permutation."""
    relations = _relations(tensor, example) if has_integers(tensor) else ()
    return not all(isinstance(relation, Indices) for relation in relations)


def referred(example: Example) -> set[int]:
    """The places of tensors of whose sizes integers say something."""
    relations = (_relations(t, example) for t in example.tensors if has_integers(t))
    return {each.of for some in relations for each in some if isinstance(each, Related)}


def are_distinct(tensor: Tensor) -> bool:
    """Whether a tensor may hold the indices at which an operator writes, each of them once."""
    return has_integers(tensor) and tensor.dim() == 1 and len(tensor.unique()) == len(tensor) > 1


def with_valid_integers(before: Example, after: Example) -> Example:
    """A resized example, with integers that are as valid as those before.

    Args:
        before: the example.
        after: the same with other sizes.

    Raises:
        Unfit: there are no such integers.
    """
    olds, news = (dict(enumerate(example.tensors)) for example in (before, after))
    totals: dict[int, int] = {}  # of segments, which an int may say too
    for place, old in olds.items():
        relations = list(_relations(old, before)) if has_integers(old) else []
        for relation in relations:
            news[place] = relation.fitted(news[place], news)
            if isinstance(relation, Lengths | Offsets):
                totals[relation.size(olds)] = relation.size(news)
        if any(relation.problem(news[place], news) for relation in relations):
            raise Unfit("no integers of that size are all that those of the example are")

    def changed(value: Any) -> Any:
        return totals.get(value, value) if type(value) is int else value

    args, kwargs = after.with_tensors(list(news.values()))
    return Example(tuple(map(changed, args)), {name: changed(kwargs[name]) for name in kwargs})


class _Permutation(Precondition):
    """Each place of a tensor once. Such integers may say where to write, which is done once."""

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        places = torch.arange(len(value), device=value.device)
        is_one = torch.equal(value.sort().values.to(places), places)
        return None if is_one else "it is no permutation"

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        return value.argsort(stable=True).argsort().to(value.dtype)


class _RowLengths(Indices):
    """How many elements of each row of a padded batch count: at most all."""

    def size(self, arguments: Arguments) -> int:
        return super().size(arguments) + 1


def _relations(tensor: Tensor, example: Example) -> Iterator[Precondition]:
    """What the integers of a tensor seem to be; other tensors are named by their places."""
    others = [*_sizes_of_others(tensor, example)]
    low, high, total = int(tensor.min()), int(tensor.max()), int(tensor.sum())
    rises = len(tensor) > 1 and is_sorted(tensor) if tensor.dim() else False
    ends = [(place, dim) for place, dim, size in others if size == high]
    sums = [(place, dim) for place, dim, size in others if size == total]
    if rises and low == 0 and ends:
        yield Offsets(*ends[0])
        return
    if tensor.dim() and low >= 0 and sums:
        yield Lengths(*sums[0])
    if rises:
        yield Sorted()
    elif are_distinct(tensor) and _Permutation().problem(tensor, {}) is None:
        yield _Permutation()
    # Small indices often add up to a size, so lengths may as well be indices.
    for place, dim, size in others:
        if low >= 0 and high < size:
            yield Indices(place, dim)
        elif low >= 0 and high == size and tensor.shape == example.tensors[place].shape[:1] and dim:
            yield _RowLengths(place, dim)


def _sizes_of_others(tensor: Tensor, example: Example) -> Iterator[tuple[int, int, int]]:
    """The sizes of the other tensors, each with the place of the tensor and the dimension."""
    for place, other in enumerate(example.tensors):
        if other is not tensor and is_plain(other):
            yield from ((place, dim, size) for dim, size in enumerate(other.shape))
