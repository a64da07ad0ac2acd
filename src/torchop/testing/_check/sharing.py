"""Variants of a call with two arguments that share memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.cases import Case
from torchop.testing._check.layouts import GUARD, filler
from torchop.testing._check.subject import Subject

# Takes two tensors and returns two replacements that share memory with each other.
Sharing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def one_tensor(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    if first.shape != second.shape:
        raise CannotCheck("no two tensors have equal shapes and dtypes")
    return first, first


def one_view(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    if second.numel() > first.numel():
        raise CannotCheck("no tensor is large enough to be viewed in the shape of another")
    return first, first.view(-1)[: second.numel()].view(second.shape)


def overlapping(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Copy both tensors into one buffer, with an overlap, and return the copies.

    The second copy starts one element after the first. The first tensor is copied last and
    overwrites the overlapping part.
    """
    size = max(first.numel(), second.numel() + 1) + GUARD
    memory = torch.full((size,), 0, dtype=first.dtype, device=first.device)
    memory.fill_(filler(first, finite=True))
    memory[1 : 1 + second.numel()] = second.reshape(-1)
    memory[: first.numel()] = first.reshape(-1)
    return (
        memory[: first.numel()].view(first.shape),
        memory[1 : 1 + second.numel()].view(second.shape),
    )


def _share(sharing: Sharing, left: int, right: int, example: Example) -> Example:
    tensors = example.tensors
    first, second = tensors[left], tensors[right]
    if first.dtype != second.dtype or not (probes.is_plain(first) and probes.is_plain(second)):
        raise CannotCheck("no call has two tensors of equal dtype")
    if first.device != second.device or not first.numel() or not second.numel():
        raise CannotCheck("no call has two non-empty tensors on the same device")
    pair = sharing(first, second)
    # Moving two tensors into shared memory overwrites some of their values. Integers may be
    # indices, and an overwritten index could be out of range, so skip the case if any integer has
    # changed.
    values = ((first, pair[0]), (second, pair[1]))
    if probes.has_integers(first) and not all(torch.equal(old, new) for old, new in values):
        raise CannotCheck("integers that differ cannot share memory")
    tensors[left], tensors[right] = pair
    return example.with_tensors(tensors)


_WORDS: dict[Sharing, str] = {
    one_tensor: "are one tensor",
    one_view: "are views of each other",
    overlapping: "overlap",
}


def shared(
    sharings: Sequence[Sharing], with_written: bool, subject: Subject, example: Example
) -> Iterator[Case]:
    """Yield cases where two tensors of the example share memory.

    With `with_written`, the operator writes to one of the two tensors; otherwise it reads both.
    """
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
                continue  # list items, such as parameters, do not share memory in real programs
            if with_written and tensors[left].shape != tensors[right].shape:
                continue  # no real program passes, for example, a part of the output as a weight
            names, found = subject.names(example), True
            label = f"{names[left]} and {names[right]} {_WORDS[sharing]}"
            yield Case(label, example, functools.partial(_share, sharing, left, right))
    if not found:
        raise CannotCheck(
            "nothing is written" if with_written else "no call only reads two tensors"
        )
