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

# The number of guard elements after each tensor, and also before a tensor with a storage offset.
# They reveal kernels that read or write outside of the tensor.
GUARD = 8


def filler(tensor: Tensor, finite: bool = False) -> float:
    """Return a value for the memory around a tensor.

    For floating-point tensors, the value is NaN by default, so that a kernel that reads the memory
    returns NaN. But if a kernel adds to the memory, NaN stays NaN. So with `finite=True`, the value
    is a finite number, and the addition changes it.

    For integer tensors, the value is an element of the tensor. The integers may be indices, and any
    other value could be out of range and crash the kernel.
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
    """Return contiguous strides for a shape after adding `row` to each of its sizes."""
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
    """Repeat the first slice along a dimension, with stride 0.

    The dimension is the first one with more than one element.
    """
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
}
# The layouts for tensors that the operator writes to. "expanded" is left out, because elements of a
# tensor must not share memory if the operator writes to the tensor.
WRITABLE = tuple(name for name in LAYOUTS if name != "expanded")


def lay_out(layouts: Mapping[int, str], example: Example, finite: bool = False) -> Example:
    """Return the example with some of its tensors copied into other layouts.

    `layouts` maps the index of a tensor to the name of its layout. With `finite=True`, the memory
    around the tensors holds finite numbers instead of NaN.
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
    """Return a function that copies tensors of an example into a layout.

    It copies the tensors at `places`, or all tensors if `places` is None.
    """

    def arrange(example: Example) -> Example:
        chosen = range(len(example.tensors)) if places is None else places
        return lay_out(dict.fromkeys(chosen, layout), example, finite)

    return arrange
