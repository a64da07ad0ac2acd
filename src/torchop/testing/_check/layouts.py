"""Copy tensors into memory with different strides and storage offsets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.cases import Arrangement
from torchop.testing._check.relations import has_fixed_values
from torchop.testing.probes import is_plain, negative_view

# The number of guard elements after each tensor, and before tensors with a storage offset. The
# guard elements expose kernels that read or write out of bounds.
GUARD = 8


def filler(tensor: Tensor, finite: bool = False) -> float:
    """Return the value with which to fill the memory around a tensor.

    Floating-point tensors are surrounded by NaN by default, so a kernel that reads out of bounds
    returns NaN. NaN does not expose a kernel that adds to the surrounding memory, because the sum
    is still NaN. With `finite=True`, the value is therefore a finite number.

    Integer tensors are surrounded by one of their own elements. They may hold indices, and an
    arbitrary value could be out of range and crash the kernel.
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
    span = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    size = offset + (span + 1 if tensor.numel() else 0) + GUARD
    memory = torch.full((size,), 0, dtype=tensor.dtype, device=tensor.device)
    memory.fill_(filler(tensor, finite))
    view = memory.as_strided(tuple(tensor.shape), strides, offset)
    return view.copy_(tensor)


def contiguous_strides(shape: torch.Size, row: int = 0) -> tuple[int, ...]:
    """Return the contiguous strides of `shape` with each dimension enlarged by `row`."""
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
        raise CannotCheck("no tensor has a dimension")
    return placed(tensor, tuple(2 * s for s in contiguous_strides(tensor.shape)), finite=finite)


def sliced(tensor: Tensor, finite: bool = False) -> Tensor:
    if not tensor.dim():
        raise CannotCheck("no tensor has a dimension")
    strides = contiguous_strides(tensor.shape, row=2)
    return placed(tensor, strides, offset=sum(strides), finite=finite)


def expanded(tensor: Tensor, finite: bool = False) -> Tensor:
    """Repeat the first slice along the first dimension of more than one element, with stride 0."""
    dims = [d for d, size in enumerate(tensor.shape) if size > 1]
    if not dims:
        raise CannotCheck("no tensor has a dimension of more than one element")
    row = contiguous(tensor.narrow(dims[0], 0, 1).contiguous(), finite)
    return row.expand(tensor.shape)


def expanded_last(tensor: Tensor, finite: bool = False) -> Tensor:
    """Repeat the first slice along the last dimension of more than one element, with stride 0."""
    dims = [d for d, size in enumerate(tensor.shape) if size > 1]
    if len(dims) < 2:
        raise CannotCheck("no tensor has two dimensions of more than one element")
    column = contiguous(tensor.narrow(dims[-1], 0, 1).contiguous(), finite)
    return column.expand(tensor.shape)


def channels_last(tensor: Tensor, finite: bool = False) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        raise CannotCheck("no tensor has four or five dimensions")
    return tensor.contiguous(memory_format=formats[tensor.dim()])


def negative(tensor: Tensor, finite: bool = False) -> Tensor:
    if tensor.dtype not in (torch.float, torch.double):
        raise CannotCheck("no tensor has dtype float32 or float64")
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
    "channels_last": channels_last,
    "odd_strides": odd_strides,
    "negative": negative,
    "conjugate": conjugate,
    "expanded": expanded,
    "expanded_last": expanded_last,
}
_EXPANDED = ("expanded", "expanded_last")
# The layouts for tensors that the operator writes to. An expanded tensor is not a valid output,
# because several of its elements share the same memory.
WRITABLE = tuple(name for name in LAYOUTS if name not in _EXPANDED)


def lay_out(layouts: Mapping[int, str], example: Example, finite: bool = False) -> Example:
    """Return an example in which some tensors have been copied into other layouts.

    `layouts` maps the index of each tensor to the name of its new layout. With `finite=True`, the
    memory around the tensors holds finite numbers instead of NaN (see `filler`).
    """
    tensors = example.tensors
    problem: CannotCheck | None = None
    changed = False
    for index, tensor in enumerate(tensors):
        layout = layouts.get(index)
        if layout is None or not is_plain(tensor):
            continue
        if layout in _EXPANDED and has_fixed_values(tensor, example):
            problem = CannotCheck(
                "integers that are sorted, lengths or a permutation cannot be expanded"
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
    layout: str, places: Iterable[int] | None = None, finite: bool = False
) -> Arrangement:
    """Return a function that copies the tensors of an example into a layout.

    If `places` is given, the function copies only the tensors with these indices.
    """

    def arrange(example: Example) -> Example:
        chosen = range(len(example.tensors)) if places is None else places
        return lay_out(dict.fromkeys(chosen, layout), example, finite)

    return arrange
