"""Variants that enlarge dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchop.testing import probes
from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.cases import Case
from torchop.testing._check.sizes import (
    ODD,
    each_resized,
    larger_sizes,
    sizes,
    sizes_changed,
    with_size,
)
from torchop.testing._check.subject import Subject


def longer(subject: Subject, example: Example) -> Iterator[Case]:
    for change, other in each_resized(example, *({n: n + 1} for n in sizes(example) if n)):
        yield Case(sizes_changed(change), other)


def larger(blocks: Sequence[int], subject: Subject, example: Example) -> Iterator[Case]:
    """Enlarge dimensions to the sizes in `blocks`, changing dimensions of equal size together."""
    changes = larger_sizes(example, _results(subject, example), blocks)
    if not changes:
        raise CannotCheck("no tensor has a dimension that can grow")
    for change, other in each_resized(example, *changes):
        yield Case(sizes_changed(change), other)


def _results(subject: Subject, example: Example) -> list[torch.Tensor]:
    return probes.tensors_of(subject.first_calls[subject.place(example)].record.outcome)


def odd(subject: Subject, example: Example) -> Iterator[Case]:
    """Enlarge each size to `ODD` and make all others odd, so that numbers of elements are odd."""
    for change in larger_sizes(example, _results(subject, example), (ODD,)):
        others = {size: size | 1 for size in sizes(example)}
        if any(size != other for size, other in others.items() if size not in change):
            for changed, other in each_resized(example, others | change):
                yield Case(sizes_changed(changed), other)


def uneven(subject: Subject, example: Example) -> Iterator[Case]:
    """Enlarge one dimension of the last tensor in a list, so that the tensors differ in size."""
    names = subject.names(example)
    places = [p for p, t in enumerate(example.tensors) if "[" in names[p] and probes.is_plain(t)]
    if len(places) < 2:
        raise CannotCheck("no argument is a list of two tensors")
    place = places[-1]
    tensor = example.tensors[place]
    for dim in range(tensor.dim() if tensor.numel() else 0):
        enlarged = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        yield Case(f"{names[place]} longer in dimension {dim}", example.replace(place, enlarged))


def counts(subject: Subject, example: Example) -> Iterator[Case]:
    """Remove or repeat the last tensor of a list."""
    # C++ kernels may read beyond the end of a shorter list, so change lists for Python kernels
    # only.
    if subject.operator.function is None:
        raise CannotCheck("the kernel is not a Python function")
    named = subject.by_name(example)
    for name, value in named.kwargs.items():
        if isinstance(value, list | tuple) and len(probes.tensors_of(value)) == len(value) > 1:
            for words, changed in (("fewer", value[:-1]), ("more", [*value, value[-1].clone()])):
                label = f"{name} with one tensor {words}"
                yield Case(label, named.with_argument(name, list(changed)))


def unequal(subject: Subject, example: Example) -> Iterator[Case]:
    """Enlarge one of two equal dimensions of a tensor, so that a square matrix becomes non-square.

    A backward formula or fake kernel that mixes up two dimensions still gives correct results for
    square matrices, so the original example does not reveal the bug.
    """
    # C++ kernels may read out of bounds if the shapes of their arguments do not match, so change
    # shapes for Python kernels only.
    if subject.operator.function is None:
        raise CannotCheck("the kernel is not a Python function")
    names = subject.names(example)
    for place, tensor in enumerate(example.tensors):
        if not probes.is_plain(tensor):
            continue
        for dim, size in enumerate(tensor.shape):
            if size and tensor.shape.count(size) > 1:
                longer = with_size(tensor, dim, size + 1)
                label = f"{names[place]} longer in dimension {dim}"
                yield Case(label, example.replace(place, longer))
