"""Recognize integer arguments that depend on other arguments, such as indices and offsets.

Kernels often do not validate integers, and read out of bounds if an index is too large. So when a
variant resizes the tensors of an example, all indices must remain in range, all lengths must still
add up, and so on. This module infers such relations from the values in an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing.probes import has_integers, is_plain, is_sorted


def has_fixed_values(tensor: Tensor, example: Example) -> bool:
    """Return whether a tensor may contain integers that depend on each other.

    Examples are sorted integers, segment lengths, and permutations. Variants must not change such
    integers one at a time, or set them all to the same value.
    """
    relations = _relations(tensor, example) if has_integers(tensor) else ()
    return not all(isinstance(relation, _Indices) for relation in relations)


def referred(example: Example) -> set[int]:
    """Return the indices of tensors that integers refer to, i.e. whose sizes bound the integers."""
    relations = (_relations(t, example) for t in example.tensors if has_integers(t))
    return {each.place for some in relations for each in some if isinstance(each, _Related)}


def are_distinct(tensor: Tensor) -> bool:
    """Return whether a tensor is a vector of distinct integers, such as scatter indices."""
    return has_integers(tensor) and tensor.dim() == 1 and len(tensor.unique()) == len(tensor) > 1


def is_permutation(tensor: Tensor) -> bool:
    return _Permutation().holds(tensor, ())


def with_valid_integers(before: Example, after: Example) -> Example:
    """Adapt the integers of a resized example to the new sizes.

    For example, indices into a dimension of another tensor remain valid after the dimension has
    been resized.
    """
    olds, news = before.tensors, after.tensors
    # Maps the old total length of segments to the new total length. If an int argument equals an
    # old total, it probably holds this total, so it is replaced as well.
    totals: dict[int, int] = {}
    for place, old in enumerate(olds):
        relations = list(_relations(old, before)) if has_integers(old) else []
        for relation in relations:
            news[place] = relation.fitted(news[place], news)
            if isinstance(relation, _Lengths | _Offsets):
                totals[relation.size(olds)] = relation.size(news)
        if not all(relation.holds(news[place], news) for relation in relations):
            raise CannotCheck("integer arguments cannot be adapted to this size")

    def changed(value: Any) -> Any:
        return totals.get(value, value) if type(value) is int else value

    args, kwargs = after.with_tensors(news)
    return Example(tuple(map(changed, args)), {name: changed(kwargs[name]) for name in kwargs})


class _Relation:
    """A property of the integers in a tensor, which may depend on the size of another tensor."""

    def holds(self, value: Tensor, tensors: Sequence[Tensor]) -> bool:
        raise NotImplementedError

    def fitted(self, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Adjust `value` so that it satisfies the relation, or raise CannotCheck."""
        raise NotImplementedError


class _Sorted(_Relation):
    """Integers in non-decreasing order."""

    def holds(self, value: Tensor, tensors: Sequence[Tensor]) -> bool:
        return is_sorted(value)

    def fitted(self, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return value.sort().values


class _Permutation(_Relation):
    """A permutation, such as scatter indices."""

    def holds(self, value: Tensor, tensors: Sequence[Tensor]) -> bool:
        places = torch.arange(len(value), device=value.device)
        return torch.equal(value.sort().values.to(places), places)

    def fitted(self, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return value.argsort(stable=True).argsort().to(value.dtype)


@dataclass(frozen=True)
class _Related(_Relation):
    """A relation between the integers and the size of dimension `dim` of the tensor at `place`."""

    place: int
    dim: int

    def size(self, tensors: Sequence[Tensor]) -> int:
        return tensors[self.place].shape[self.dim]


class _Indices(_Related):
    """Indices into the dimension, from 0 to size - 1."""

    def holds(self, value: Tensor, tensors: Sequence[Tensor]) -> bool:
        return not value.numel() or 0 <= int(value.min()) <= int(value.max()) < self.size(tensors)

    def fitted(self, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        size = self.size(tensors)
        if value.numel() and not size:
            raise CannotCheck("indices cannot refer to an empty tensor")
        # The dimension may be larger than the largest number of the dtype, so clamp to that number
        # too.
        return value.clamp(0, min(size - 1, torch.iinfo(value.dtype).max)) if size else value


class _RowLengths(_Indices):
    """The number of valid elements in each row of a padded batch, from 0 to the row length."""

    def size(self, tensors: Sequence[Tensor]) -> int:
        return super().size(tensors) + 1


class _Offsets(_Related):
    """The offsets of consecutive segments, increasing from 0 to the size of the dimension."""

    def holds(self, value: Tensor, tensors: Sequence[Tensor]) -> bool:
        ends = (int(value[0]), int(value[-1])) if len(value) else ()
        return is_sorted(value) and ends == (0, self.size(tensors))

    def fitted(self, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        if len(value) < 2:
            raise CannotCheck("a segment needs two offsets")
        made = value.clamp(0, self.size(tensors)).cummax(0).values
        made[0], made[-1] = 0, self.size(tensors)
        return made


class _Lengths(_Related):
    """The lengths of segments, which add up to the size of the dimension."""

    def holds(self, value: Tensor, tensors: Sequence[Tensor]) -> bool:
        return bool((value >= 0).all()) and int(value.sum()) == self.size(tensors)

    def fitted(self, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        total = self.size(tensors)
        if not value.numel():
            return value
        # If the dimension has become too short for all segments, shorten the segments at the end.
        # If it has grown, extend the last segment.
        ends = value.flatten().clamp(min=0).cumsum(0).clamp(max=total)
        ends[-1] = total
        return ends.diff(prepend=ends.new_zeros(1)).view_as(value).to(value.dtype)


def _relations(tensor: Tensor, example: Example) -> Iterator[_Relation]:
    """Yield the relations that the values of an integer tensor satisfy, possibly by chance."""
    others = [*_sizes_of_others(tensor, example)]
    low, high, total = int(tensor.min()), int(tensor.max()), int(tensor.sum())
    rises = len(tensor) > 1 and is_sorted(tensor) if tensor.dim() else False
    ends = [(place, dim) for place, dim, size in others if size == high]
    sums = [(place, dim) for place, dim, size in others if size == total]
    if rises and low == 0 and ends:
        yield _Offsets(*ends[0])
        return
    if tensor.dim() and low >= 0 and sums:
        yield _Lengths(*sums[0])
    if rises:
        yield _Sorted()
    elif are_distinct(tensor) and is_permutation(tensor):
        yield _Permutation()
    # Some indices may happen to add up to a size, which makes them look like lengths. So treat
    # integers that look like lengths as possible indices too.
    for place, dim, size in others:
        if low >= 0 and high < size:
            yield _Indices(place, dim)
        elif low >= 0 and high == size and tensor.shape == example.tensors[place].shape[:1] and dim:
            yield _RowLengths(place, dim)


def _sizes_of_others(tensor: Tensor, example: Example) -> Iterator[tuple[int, int, int]]:
    for place, other in enumerate(example.tensors):
        if other is not tensor and is_plain(other):
            yield from ((place, dim, size) for dim, size in enumerate(other.shape))
