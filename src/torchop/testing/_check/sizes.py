"""Resize the tensors of an example."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.relations import are_distinct, with_valid_integers


def sizes(example: Example) -> list[int]:
    return list(dict.fromkeys(n for t in example.tensors if probes.is_plain(t) for n in t.shape))


def with_size(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Resize a dimension by dropping elements at the end, or by repeating the existing ones."""
    old = tensor.shape[dim]
    if size <= old:
        return tensor if size == old else tensor.narrow(dim, 0, size)
    if old == 0:
        raise CannotCheck("an empty dimension cannot grow")
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % old)


def resized(example: Example, changes: Mapping[int, int]) -> Example:
    """Resize the dimensions of all tensors of an example.

    `changes` maps old sizes to new sizes. All dimensions of an old size are resized together, so
    dimensions of equal size stay equal, as most operators require.
    """

    def change(tensor: Tensor) -> Tensor:
        if not probes.is_plain(tensor):
            return tensor
        for dim, size in enumerate(tensor.shape):
            tensor = with_size(tensor, dim, changes.get(size, size))
        return tensor.clone(memory_format=torch.contiguous_format)

    return with_valid_integers(example, example.map(change))


def each_resized(
    example: Example, *changes: Mapping[int, int]
) -> Iterator[tuple[Mapping[int, int], Example]]:
    """Yield each change together with the resized example, skipping impossible changes."""
    for change in changes:
        with contextlib.suppress(CannotCheck):
            yield change, resized(example, change)


def sizes_changed(changes: Mapping[int, int]) -> str:
    return ", ".join(f"size {size} changed to {new}" for size, new in changes.items())


# One more than common block sizes and grid sizes of kernels.
BLOCKS = (1025, 65537)
# A size that no common tile size or vector width divides.
ODD = 127
# `ODD`, and a size that most tile sizes divide.
TILES = (ODD, 1024)
# The maximum number of elements of an enlarged example, and also of its results. With this limit, a
# call takes less than a second.
_MOST_ELEMENTS = 2**19


def larger_sizes(
    example: Example, results: Sequence[Tensor] = (), blocks: Sequence[int] = BLOCKS
) -> list[dict[int, int]]:
    """Return changes of sizes, each of which enlarges one size beyond a common block size.

    Tensors of distinct indices keep their length, because there may be too few valid indices to
    fill a longer tensor. A change is also left out if it would make the example or the `results`
    too large, as in an outer product.
    """
    fixed = {len(tensor) for tensor in example.tensors if are_distinct(tensor)}
    return [
        {size: new}
        for size in sizes(example)
        for new in blocks
        if 0 < size < new
        and size not in fixed
        and all(
            sum(_grown(tensor.shape, size, new) for tensor in tensors) <= _MOST_ELEMENTS
            for tensors in (example.tensors, results)
        )
    ]


def _grown(shape: torch.Size, size: int, new: int) -> int:
    return math.prod(new if each == size else each for each in shape)


def repeated(outcome: Sequence[Any], size: int, new: int) -> list[Any]:
    """Resize every dimension of size `size` in an outcome to `new` by repeating elements."""

    def change(tensor: Tensor) -> Tensor:
        for dim, old in enumerate(tensor.shape):
            tensor = with_size(tensor, dim, new if old == size else old)
        return tensor

    changed: list[Any] = probes.mapped(list(outcome), change)
    return changed
