"""Generate calls that broadcast one argument of an elementwise operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import REJECTED, Call, CannotCheck, Example
from torchop.testing._check.subject import Subject


def broadcast(subject: Subject, example: Example) -> Iterator[tuple[str, Example]]:
    """Yield examples that broadcast one tensor along one or more dimensions."""
    tensors = example.tensors
    if len(tensors) < 2:
        return
    shape = _broadcast_shape(subject, example)
    for place, tensor in enumerate(tensors):
        if not tensor.dtype.is_floating_point:
            continue
        name = subject.names(example)[place]
        for dim, size in enumerate(tensor.shape[:3]):
            if size > 1:
                narrow = tensor.detach().narrow(dim, 0, 1).clone()
                narrowed = requiring_grad_as(example.replace(place, narrow), example)
                # If the fake kernel and the kernel disagree about the sizes of results, assume that
                # the author did not mean to support broadcasting, and skip the call.
                if subject.has_fake_sizes(narrowed):
                    yield f"{name} with size 1 in dimension {dim}", narrowed
        if shape is None:
            continue
        full = example.with_tensors([t.detach().expand(shape).clone() for t in tensors])
        ones = [(*shape[:dim], 1, *shape[dim + 1 :]) for dim in range(len(shape))]
        for other in dict.fromkeys((*ones, shape[1:], ())):
            small = _reduced(full.tensors[place], other)
            changed = requiring_grad_as(full.replace(place, small), example)
            if other != shape and subject.has_fake_sizes(changed):
                yield f"{name} of shape {other} and the others of shape {shape}", changed


def _broadcast_shape(subject: Subject, example: Example) -> tuple[int, ...] | None:
    """Return the shape that the tensors of an example broadcast to.

    The shape has at least two dimensions. Return None unless the operator is elementwise, i.e.
    slicing the broadcast tensors gives the same slices of the results.
    """
    tensors = [tensor.detach() for tensor in example.tensors]
    if subject.is_random or not all(map(probes.is_plain, tensors)):
        return None

    def results(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        changed = example.with_tensors([*map(change, tensors)])
        if not subject.is_valid(changed):
            raise CannotCheck(REJECTED)
        return probes.tensors_of(Call(subject.op, *changed).again())

    try:
        shape: tuple[int, ...] = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        if len(shape) < 2:
            shape = (2, *shape)
        if 0 in shape:
            return None
        with torch.no_grad():
            whole = results(lambda t: t.expand(shape).clone())
            if any(result.shape != shape for result in whole):
                return None
            for dim, size in enumerate(shape):
                part = results(functools.partial(_last_of, shape, dim))
                selected = [result.narrow(dim, size - 1, 1) for result in whole]
                probes.assert_same(part, selected, "")
    except Exception:
        return None
    return tuple(shape)


def _last_of(shape: Sequence[int], dim: int, tensor: Tensor) -> Tensor:
    return tensor.expand(shape).narrow(dim, shape[dim] - 1, 1).contiguous()


def _reduced(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Slice a tensor down to `shape`, a shape that broadcasts to the original one."""
    missing = tensor.dim() - len(shape)
    for _ in range(missing):
        tensor = tensor[0]
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor.clone()


def requiring_grad_as(example: Example, before: Example) -> Example:
    """Return the example with requires_grad set on the same tensors as in `before`."""
    pairs = zip(example.tensors, before.tensors, strict=True)
    return example.with_tensors([t.detach().requires_grad_(o.requires_grad) for t, o in pairs])
