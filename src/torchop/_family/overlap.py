"""Whether tensors share memory, told exactly.

PyTorch's own check gives up on tensors that are not dense, and lets them pass. A kernel that writes
into one place twice, or reads what it has overwritten, computes nonsense without a word.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class Overlap(enum.Enum):
    """What two tensors have in common."""

    NOTHING = enum.auto()
    EVERYTHING = enum.auto()
    SOMETHING = enum.auto()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor are one place in memory, as in an expanded tensor."""
    if not _has_memory(tensor) or tensor.is_contiguous():
        return False
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= extent:
            break  # this dimension steps into the ones below it: it may still miss their elements
        extent += stride * (size - 1)
    else:
        return False
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return True
    places = torch.arange(_extent(tensor)).as_strided(tensor.shape, tensor.stride())
    return len(places.unique()) < tensor.numel()


def overlap(written: Tensor, read: Tensor) -> Overlap:
    """What a tensor to write, which does not overlap itself, shares with another one."""
    if written is read:
        return Overlap.EVERYTHING
    if not (_has_memory(written) and _has_memory(read)) or written.device != read.device:
        return Overlap.NOTHING
    # Addresses, not storages: tensors made from one NumPy array have a storage each.
    starts = written.data_ptr(), read.data_ptr()
    ends = [s + _bytes(t) for s, t in zip(starts, (written, read), strict=True)]
    if starts[0] >= ends[1] or starts[1] >= ends[0]:
        return Overlap.NOTHING
    if starts[0] == starts[1] and _layout(written) == _layout(read):
        return Overlap.EVERYTHING
    # They may still be interleaved, like two columns of a matrix.
    begin = min(starts)
    touched = torch.zeros(max(ends) - begin, dtype=torch.bool)
    _mark(touched, written, starts[0] - begin).fill_(True)
    shared = bool(_mark(touched, read, starts[1] - begin).any())
    return Overlap.SOMETHING if shared else Overlap.NOTHING


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _extent(tensor: Tensor) -> int:
    """How many elements lie between the first and the last one, both included."""
    return 1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _bytes(tensor: Tensor) -> int:
    return _extent(tensor) * tensor.element_size()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    sizes = tensor.shape
    # The stride of a dimension of one element says nothing.
    steps = tuple(s for s, n in zip(tensor.stride(), sizes, strict=True) if n > 1)
    return sizes, steps, tensor.element_size()


def _mark(memory: Tensor, tensor: Tensor, offset: int) -> Tensor:
    """The bytes of a tensor, in a picture of the memory."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, size), (*strides, 1), offset)
