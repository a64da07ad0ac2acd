"""Variants of examples: the same values elsewhere in memory, other sizes, dtypes and values."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchop.testing._check.relations import are_distinct, has_fixed_values, with_valid_integers
from torchop.testing._check.subject import Arrangement, CannotCheck, Example, Subject
from torchop.testing.probes import is_plain, negative_view

# Elements behind each tensor that do not belong to it, and in front of one with an offset.
GUARD = 8


def filler(tensor: Tensor, finite: bool = False) -> float:
    """What stands in memory beside a tensor: NaN, or for integers a value that the tensor has.

    NaN shows what is read; a finite number, what is written, for NaN plus one is NaN.

    An index that is read there by mistake must not lead a kernel anywhere else.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return 3.0 if finite else float("nan")
    if not tensor.numel():
        return 0
    if tensor.dtype is torch.bool:
        return not bool(tensor.flatten()[-1])
    low, high = int(tensor.min()), int(tensor.max())
    last = int(tensor.flatten()[-1])
    return high if last != high else low


def placed(
    tensor: Tensor, strides: tuple[int, ...], offset: int = 0, finite: bool = False
) -> Tensor:
    """The values of a tensor with other strides, in memory with a guard region at its end."""
    span = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    size = offset + (span + 1 if tensor.numel() else 0) + GUARD
    memory = torch.full((size,), 0, dtype=tensor.dtype, device=tensor.device)
    memory.fill_(filler(tensor, finite))
    view = memory.as_strided(tuple(tensor.shape), strides, offset)
    return view.copy_(tensor)


def contiguous_strides(shape: torch.Size, row: int = 0) -> tuple[int, ...]:
    """The strides of a contiguous tensor; with `row` more elements in each dimension."""
    return torch.empty([size + row for size in shape], device="meta").stride()


def contiguous(tensor: Tensor, finite: bool = False, offset: int = 0) -> Tensor:
    return placed(tensor, contiguous_strides(tensor.shape), offset, finite)


def transposed(tensor: Tensor, finite: bool = False) -> Tensor:
    if tensor.dim() < 2:
        raise CannotCheck("no tensor has two dimensions")
    strides = contiguous_strides(torch.Size(tensor.shape[::-1]))
    return placed(tensor, strides[::-1], finite=finite)


def gaps(tensor: Tensor, finite: bool = False) -> Tensor:
    if not tensor.dim():
        raise CannotCheck("every tensor has no dimension")
    return placed(tensor, tuple(2 * s for s in contiguous_strides(tensor.shape)), finite=finite)


def sliced(tensor: Tensor, finite: bool = False) -> Tensor:
    if not tensor.dim():
        raise CannotCheck("every tensor has no dimension")
    strides = contiguous_strides(tensor.shape, row=2)
    return placed(tensor, strides, offset=sum(strides), finite=finite)


def expanded(tensor: Tensor, finite: bool = False) -> Tensor:
    """The first row, as often as there are rows; of one dimension, the first element."""
    dims = [d for d, size in enumerate(tensor.shape) if size > 1]
    if not dims:
        raise CannotCheck("no tensor has a dimension of more than one element")
    row = contiguous(tensor.narrow(dims[0], 0, 1).contiguous(), finite)
    return row.expand(tensor.shape)


def channels_last(tensor: Tensor, finite: bool = False) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        raise CannotCheck("no tensor has four or five dimensions")
    return tensor.contiguous(memory_format=formats[tensor.dim()])


def negative(tensor: Tensor, finite: bool = False) -> Tensor:
    if tensor.dtype not in (torch.float, torch.double):
        raise CannotCheck("no tensor is of float32 or float64")
    return negative_view(tensor)


def conjugate(tensor: Tensor, finite: bool = False) -> Tensor:
    if not tensor.dtype.is_complex:
        raise CannotCheck("no tensor is complex")
    return contiguous(tensor.conj().resolve_conj(), finite).conj()


def odd_strides(tensor: Tensor, finite: bool = False) -> Tensor:
    if 1 not in tensor.shape:
        raise CannotCheck("no tensor has a dimension of size 1")
    steps = contiguous_strides(tensor.shape)
    strides = tuple(13 if n == 1 else s for n, s in zip(tensor.shape, steps, strict=True))
    return placed(tensor, strides, finite=finite)


LAYOUTS: Mapping[str, Callable[[Tensor, bool], Tensor]] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "gaps": gaps,
    "sliced": sliced,
    "offset": functools.partial(contiguous, offset=GUARD),
    "unaligned": functools.partial(contiguous, offset=1),
    "channels_last": channels_last,
    "odd_strides": odd_strides,
    "negative": negative,
    "conjugate": conjugate,
    "expanded": expanded,
}
# Those that even a tensor that is written may have.
WRITABLE = tuple(name for name in LAYOUTS if name != "expanded")


def lay_out(layouts: Mapping[int, str], example: Example, finite: bool = False) -> Example:
    """The example with a layout for each of these tensors.

    Raises:
        CannotCheck: no tensor can have the layout meant for it.
    """
    tensors = example.tensors
    problem: CannotCheck | None = None
    changed = False
    for index, tensor in enumerate(tensors):
        layout = layouts.get(index)
        if layout is None or not is_plain(tensor):
            continue
        if layout == "expanded" and has_fixed_values(tensor, example):
            problem = CannotCheck(
                "its integers are sorted, lengths or a permutation, and may not be equal"
            )
            continue
        try:
            tensors[index] = LAYOUTS[layout](tensor, finite)
            changed = True
        except CannotCheck as error:
            problem = error
    if not changed:
        raise problem or CannotCheck("no argument is a plain tensor")
    return example.with_tensors(tensors)


def in_layout(
    layout: str | Mapping[int, str], places: Iterable[int] | None = None, finite: bool = False
) -> Arrangement:
    """What lays out the tensors at these places like that, or all tensors, or each in its way."""

    def arrange(example: Example) -> Example:
        if not isinstance(layout, str):
            return lay_out(layout, example, finite)
        chosen = range(len(example.tensors)) if places is None else places
        return lay_out(dict.fromkeys(chosen, layout), example, finite)

    return arrange


def all_and_each(items: Iterable[int]) -> list[list[int]]:
    """All of them, then each for itself."""
    every = list(items)
    singles = [[item] for item in every]
    return [every, *singles] if len(every) > 1 else singles


def sizes(example: Example) -> list[int]:
    """The sizes that dimensions of tensors have, each once."""
    return list(dict.fromkeys(n for t in example.tensors if is_plain(t) for n in t.shape))


def with_size(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A tensor with another size in a dimension: the first elements, or all of them repeated."""
    old = tensor.shape[dim]
    if size <= old:
        return tensor if size == old else tensor.narrow(dim, 0, size)
    if old == 0:
        raise CannotCheck("there is no element to repeat")
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % old)


def resized(example: Example, changes: Mapping[int, int]) -> Example:
    """The example with other sizes: dimensions of one size stay of one size.

    Raises:
        CannotCheck: there is no such example.
    """

    def change(tensor: Tensor) -> Tensor:
        if not is_plain(tensor):
            return tensor
        for dim, size in enumerate(tensor.shape):
            tensor = with_size(tensor, dim, changes.get(size, size))
        return tensor.clone(memory_format=torch.contiguous_format)

    return with_valid_integers(example, example.map(change))


# One more than what blocks and grids often have. The first is one more than 256 times 4, too.
BLOCKS = (1025, 65537)
_MOST_ELEMENTS = 2**19  # of an example, or of its results, so that a call takes no second


def larger_sizes(
    example: Example, new_sizes: Sequence[int] = BLOCKS, results: Sequence[Tensor] = ()
) -> list[dict[int, int]]:
    """Changes of one size each to a little more than what blocks of a kernel often have.

    The number of distinct indices is none of them: there would be more indices than places. Nor is
    one with which the `results` of the example would be large, as those of an outer product are.
    """
    fixed = {len(tensor) for tensor in example.tensors if are_distinct(tensor)}
    return [
        {size: new}
        for size in sizes(example)
        for new in new_sizes
        if 0 < size < new
        and size not in fixed
        and all(
            sum(_grown(tensor.shape, size, new) for tensor in tensors) <= _MOST_ELEMENTS
            for tensors in (example.tensors, results)
        )
    ]


def _grown(shape: torch.Size, size: int, new: int) -> int:
    return math.prod(new if each == size else each for each in shape)


def each_resized(
    example: Example, *changes: Mapping[int, int], subject: Subject | None = None
) -> Iterator[tuple[Mapping[int, int], Example]]:
    """Each of these changes with the example that it makes, where there is one.

    With a subject, only valid calls of it.
    """
    for change in changes:
        with contextlib.suppress(CannotCheck):
            changed = resized(example, change)
            if subject is None or subject.is_valid(changed):
                yield change, changed


def sizes_changed(changes: Mapping[int, int]) -> str:
    """What `resized` changed, in words."""
    return ", ".join(f"dimensions of {size} with {new}" for size, new in changes.items())
