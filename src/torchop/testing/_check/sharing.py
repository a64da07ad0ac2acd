"""Variants in which arguments share memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.cases import Case
from torchop.testing._check.layouts import GUARD, contiguous_strides, filler
from torchop.testing._check.subject import Subject

Sharing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def one_tensor(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor for both."""
    if first.shape != second.shape:
        raise CannotCheck("no two tensors have one shape and dtype")
    return first, first


def one_view(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The second one is a view of the first."""
    if second.numel() > first.numel():
        raise CannotCheck("no tensor is large enough for a view of the shape of another")
    return first, first.view(-1)[: second.numel()].view(second.shape)


def overlapping(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The second one starts one element behind the first."""
    size = max(first.numel(), second.numel() + 1) + GUARD
    memory = torch.full((size,), 0, dtype=first.dtype, device=first.device)
    memory.fill_(filler(first, finite=True))
    memory[1 : 1 + second.numel()] = second.reshape(-1)
    memory[: first.numel()] = first.reshape(-1)
    return (
        memory[: first.numel()].view(first.shape),
        memory[1 : 1 + second.numel()].view(second.shape),
    )


def interleaved(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Their elements are interleaved in one memory, and none is of both."""
    if not first.dim() or not second.dim():
        raise CannotCheck("no two tensors of one dtype have a dimension")
    size = 2 * max(first.numel(), second.numel()) + GUARD
    memory = torch.full((size,), 0, dtype=first.dtype, device=first.device)
    pair = []
    for start, tensor in enumerate((first, second)):
        strides = tuple(2 * stride for stride in contiguous_strides(tensor.shape))
        pair.append(memory.as_strided(tuple(tensor.shape), strides, start).copy_(tensor))
    return pair[0], pair[1]


def _share(sharing: Sharing, left: int, right: int, example: Example) -> Example:
    tensors = example.tensors
    first, second = tensors[left], tensors[right]
    if first.dtype != second.dtype or not (probes.is_plain(first) and probes.is_plain(second)):
        raise CannotCheck("no call has two tensors of one dtype")
    if first.device != second.device or not first.numel() or not second.numel():
        raise CannotCheck("no call has two tensors of one device with elements")
    pair = sharing(first, second)
    # An index, a length or an offset that becomes another one may fit its argument no longer.
    values = ((first, pair[0]), (second, pair[1]))
    if probes.has_integers(first) and not all(torch.equal(old, new) for old, new in values):
        raise CannotCheck("integers that differ cannot share memory")
    tensors[left], tensors[right] = pair
    return example.with_tensors(tensors)


_WORDS: dict[Sharing, str] = {
    one_tensor: "are one tensor",
    one_view: "are views of each other",
    overlapping: "overlap",
    interleaved: "are interleaved in one memory",
}


def shared(
    sharings: Sequence[Sharing], with_written: bool, subject: Subject, example: Example
) -> Iterator[Case]:
    """Each two tensors; with `with_written`, one of them is written, and the other only read."""
    tensors, written = example.tensors, subject.written_places(example)
    arguments = [*example.args, *example.kwargs.values()]
    in_list = [isinstance(a, list) for a in arguments for _ in probes.tensors_of(a)]
    found = False
    for sharing in sharings:
        pairs = itertools.permutations(range(len(tensors)), 2)
        for left, right in itertools.islice(pairs, 12):
            counts = len({left, right} & written)
            if counts != int(with_written) or (with_written and left not in written):
                continue
            if with_written and (in_list[left] or in_list[right]):
                continue  # as of an optimizer's parameters: each has memory of its own
            differ = tensors[left].shape != tensors[right].shape
            if with_written and sharing is not interleaved and differ:
                continue  # nobody passes a weight that is a part of what is written
            names, found = subject.names(example), True
            label = f"{names[left]} and {names[right]} {_WORDS[sharing]}"
            yield Case(label, example, functools.partial(_share, sharing, left, right))
    if not found:
        raise CannotCheck(
            "nothing is written" if with_written else "no call has two tensors that are only read"
        )
