"""What integers among the arguments say of others: offsets, lengths, indices, sorted values.

An operator may rely on such a relation without a test, so a variant of an example that breaks it
shows nothing. Where the author has not declared them, they are recognised from the example alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from torchop._rules.user.preconditions.base import Precondition
from torchop.preconditions import Indices, Lengths, Offsets, Sorted
from torchop.testing._check.subject import Example
from torchop.testing.probes import has_integers, is_plain, is_sorted


def has_fixed_values(tensor: Tensor, example: Example) -> bool:
    """Whether the integers of a tensor have to stay what they are: they are sorted, or lengths."""
    if not has_integers(tensor) or tensor.dim() != 1:
        return False
    sizes = {size for _, _, size in _sizes_of_others(tensor, example)}
    return is_sorted(tensor) or int(tensor.sum()) in sizes


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
    tensors = after.tensors
    for place, old in enumerate(before.tensors):
        for relation in _relations(old, before) if has_integers(old) else ():
            tensors[place] = relation.fitted(tensors[place], dict(enumerate(tensors)))
    return after.with_tensors(tensors)


def _relations(tensor: Tensor, example: Example) -> Iterator[Precondition]:
    """What the integers of a tensor seem to be; other tensors are named by their places."""
    others = [*_sizes_of_others(tensor, example)]
    low, high, total = int(tensor.min()), int(tensor.max()), int(tensor.sum())
    rises = len(tensor) > 1 and is_sorted(tensor) if tensor.dim() else False
    ends = [(place, dim) for place, dim, size in others if size == high]
    sums = [(place, dim) for place, dim, size in others if size == total]
    if rises and low == 0 and ends:
        yield Offsets(*ends[0])
    elif tensor.dim() == 1 and low >= 0 and sums:
        yield Lengths(*sums[0])
    else:
        if rises:
            yield Sorted()
        for place, dim, size in others:
            if low >= 0 and high < size:
                yield Indices(place, dim)


def _sizes_of_others(tensor: Tensor, example: Example) -> Iterator[tuple[int, int, int]]:
    """The sizes of the other tensors, each with the place of the tensor and the dimension."""
    for place, other in enumerate(example.tensors):
        if other is not tensor and is_plain(other):
            yield from ((place, dim, size) for dim, size in enumerate(other.shape))
