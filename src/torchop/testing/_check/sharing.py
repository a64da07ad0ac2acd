"""Checks of arguments that share memory: one tensor twice, views of each other, overlaps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.kinds import Details, variants
from torchop.testing._check.memory import comparison, same_or_refused
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject
from torchop.testing._check.variants import GUARD, contiguous_strides, filler


def _one(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor for both."""
    if first.shape != second.shape:
        raise CannotCheck("no two tensors have one shape and dtype")
    return first, first


def _view(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The second one is a view of the first."""
    if second.numel() > first.numel():
        raise CannotCheck("no tensor is large enough for a view of the shape of another")
    return first, first.view(-1)[: second.numel()].view(second.shape)


def _overlapping(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
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


def _interleaved(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
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


Sharing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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
    _one: "are one tensor",
    _view: "are views of each other",
    _overlapping: "overlap",
    _interleaved: "are interleaved in one memory",
}


def _pairs(name: str, subject: Subject, details: Details) -> Iterator[Case]:
    """Each two tensors; with `with_written`, one of them is written, and the other only read."""
    sharings, with_written, _ = _KINDS[name]
    for sharing, example in itertools.product(sharings, subject.accepted()):
        written = subject.written_places(example)
        in_lists = _places_in_lists(example)
        pairs = itertools.permutations(range(len(example.tensors)), 2)
        for left, right in itertools.islice(pairs, 12):
            counts = len({left, right} & written)
            if counts != int(with_written) or (with_written and left not in written):
                continue
            if with_written and {left, right} & in_lists:
                continue  # as of an optimizer's parameters: each has memory of its own
            if with_written and sharing is not _interleaved and _differ(example, left, right):
                continue  # nobody passes a weight that is a part of what is written
            arrange = functools.partial(_share, sharing, left, right)
            names = subject.names(example)
            label = f"{names[left]} and {names[right]} {_WORDS[sharing]}"
            if with_written and sharing is not _interleaved:
                options = {"what": "an argument that is read is also written"}
                yield Case(label, same_or_refused, example, arrange, options, calls=False)
            else:
                yield comparison(subject, label, example, arrange)
    raise CannotCheck(
        "nothing is written" if with_written else "no call has two tensors that are only read"
    )


def _differ(example: Example, left: int, right: int) -> bool:
    """Whether two tensors have other shapes, so that nobody computes one in place of the other."""
    tensors = example.tensors
    return tensors[left].shape != tensors[right].shape


def _places_in_lists(example: Example) -> set[int]:
    """The places, among the tensors of an example, of those that are passed in lists."""
    arguments = [*example.args, *example.kwargs.values()]
    is_in_list = [isinstance(a, list) for a in arguments for _ in probes.tensors_of(a)]
    return {place for place, is_listed in enumerate(is_in_list) if is_listed}


_KINDS: dict[str, tuple[Sequence[Sharing], bool, str]] = {
    "one": ((_one,), False, "Does it do the same if one tensor is passed for two arguments?"),
    "view": ((_view,), False, "The same if one argument is a view of another?"),
    "overlap": ((_overlapping,), False, "The same if arguments overlap?"),
    "beside": (
        (_interleaved,),
        True,
        "Is the memory between the elements of a written argument left unchanged?",
    ),
    "written": (
        (_view, _overlapping),
        True,
        "Is an argument that overlaps a written one refused, or the outcome the same?",
    ),
}
CHECKS = variants("sharing", {name: question for name, (*_, question) in _KINDS.items()}, _pairs)
