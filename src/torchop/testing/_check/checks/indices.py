"""Find integer tensors in which elements may repeat, such as the indices of a gather."""

from __future__ import annotations

import torch

from torchop.testing import probes
from torchop.testing._check.calls import Call, Example
from torchop.testing._check.relations import is_permutation
from torchop.testing._check.subject import Subject


def that_may_repeat(example: Example) -> list[int]:
    """Return the positions of integer tensors in which elements may repeat, such as gather indices.

    Leave out scatter indices, because an operator may require distinct ones. This is a heuristic:
    if an integer tensor shares a size with a floating-point tensor, assume scatter indices.
    """
    floats = [tensor for tensor in example.tensors if not probes.has_integers(tensor)]
    lengths = {size for tensor in floats for size in tensor.shape}
    return [
        place
        for place, tensor in enumerate(example.tensors)
        if probes.has_integers(tensor) and tensor.dim() and not lengths.intersection(tensor.shape)
    ]


def gathers(subject: Subject, example: Example, place: int) -> bool:
    """Return whether an integer tensor is used like the indices of a gather.

    In this case, a result has one slice for each integer, and equal integers give equal slices.
    `place` is the position of the integer tensor in `example.tensors`.
    """
    integers = example.tensors[place]
    if not probes.has_integers(integers) or integers.dim() != 1 or len(integers) < 2:
        return False
    if is_permutation(integers):
        return False  # the formula may require a permutation, e.g. to invert it
    try:
        with torch.no_grad():
            one, other = (
                probes.tensors_of(Call(subject.op, *each).again())
                for each in (example, with_equal(example, place))
            )
    except Exception:  # the operator requires distinct integers
        return False
    for result, of_equal in zip(one, other, strict=False):
        for dim in range(result.dim() if result.shape == of_equal.shape else 0):
            if result.shape[dim] == len(integers):
                first = result.narrow(dim, 0, 1).expand_as(result)
                if torch.equal(of_equal, first) and not torch.equal(result, first):
                    return True
    return False


def with_equal(example: Example, place: int) -> Example:
    integers = example.tensors[place]
    return example.replace(place, integers[:1].expand_as(integers).clone())
