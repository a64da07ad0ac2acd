"""What integers among the arguments say of others: offsets, lengths, indices, sorted values.

An operator may rely on such a relation without a test, so a variant of an example that breaks it
shows nothing. They are recognised from the example alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchop.testing._check.subject import CannotCheck, Example
from torchop.testing.probes import is_plain, is_sorted


def has_fixed_values(tensor: Tensor, example: Example) -> bool:
    """Whether the integers of a tensor have to stay what they are: they are sorted, or lengths."""
    if not _has_integers(tensor) or tensor.dim() != 1:
        return False
    return is_sorted(tensor) or int(tensor.sum()) in _sizes_of_others(tensor, example)


def are_distinct(tensor: Tensor) -> bool:
    """Whether a tensor may hold the indices at which an operator writes, each of them once."""
    return _has_integers(tensor) and tensor.dim() == 1 and len(tensor.unique()) == len(tensor) > 1


def with_valid_integers(before: Example, after: Example, changes: Mapping[int, int]) -> Example:
    """A resized example, with integers that are as valid as those before.

    Args:
        before: the example.
        after: the same with other sizes.
        changes: the new sizes, by those before.

    Raises:
        CannotCheck: there are no such integers.
    """
    tensors = after.tensors
    for place, old in enumerate(before.tensors):
        if _has_integers(old):
            others = _sizes_of_others(old, before)
            new_sizes = {size: changes.get(size, size) for size in others}
            values = _valid(old.flatten().tolist(), old.dim(), tensors[place], new_sizes)
            valid = torch.tensor(values, dtype=old.dtype, device=old.device)
            tensors[place] = valid.view_as(tensors[place])
    return after.with_tensors(tensors)


def _has_integers(tensor: Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and tensor.dtype is not torch.bool and is_plain(tensor) and tensor.numel() > 0


def _sizes_of_others(tensor: Tensor, example: Example) -> set[int]:
    others = [t for t in example.tensors if t is not tensor and is_plain(t)]
    return {size for other in others for size in other.shape}


def _valid(old: list[int], dims: int, resized: Tensor, new_sizes: Mapping[int, int]) -> list[int]:
    """The values of a resized tensor of integers, which were `old`."""
    values = resized.flatten().tolist()
    count = len(values)
    rises = dims == 1 and len(old) > 1 and old == sorted(old)
    if rises and old[0] == 0 and old[-1] in new_sizes:
        end = new_sizes[old[-1]]
        if count < 2:
            raise CannotCheck("offsets need two elements")
        inner = (old + old[-1:] * count)[: count - 1]
        return [*(min(value, end) for value in inner), end]
    if dims == 1 and min(old) >= 0 and sum(old) in new_sizes:
        return _lengths((old + [0] * count)[:count], new_sizes[sum(old)])
    if rises:
        values.sort()
    bounds = [new for size, new in new_sizes.items() if min(old) >= 0 and max(old) < size]
    if bounds and values and min(bounds) == 0:
        raise CannotCheck("there are indices, and nothing that they could be of")
    return [min(value, min(bounds) - 1) for value in values] if bounds else values


def _lengths(lengths: list[int], total: int) -> list[int]:
    """Lengths with another sum; the last ones change first."""
    if not lengths and total:
        raise CannotCheck("lengths of which there are none have no sum")
    left = total
    for place, length in enumerate(lengths):
        lengths[place] = min(length, left)
        left -= lengths[place]
    if lengths:
        lengths[-1] += left
    return lengths
