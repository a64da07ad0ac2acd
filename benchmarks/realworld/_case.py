"""Describe calls to other packages' operators, run them, and compare two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._schema.naming import OpName


class Case(NamedTuple):
    """A call to an operator. `arguments` creates the same values each time."""

    op: str
    arguments: Callable[[], tuple[Any, ...]]
    label: str = ""


class Package(NamedTuple):
    """A package whose operators the scripts in this folder call.

    Each operator has at least one case, or `left_out` has the reason why it has none. The functions
    in `programs` call the operators through the package's API. They compute the same values each
    time, and return all of them.
    """

    name: str
    namespaces: tuple[str, ...]
    cases: Sequence[Case]
    left_out: Mapping[str, str] = {}
    programs: Mapping[str, Callable[[], list[Tensor]]] = {}


def overload(name: str) -> Any:
    parsed = OpName.parse(name)
    packet = getattr(getattr(torch.ops, parsed.namespace), parsed.name)
    return getattr(packet, parsed.overload or "default")


def run(op: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Call an operator. Return results, arguments after the call, gradients and versions."""
    before = [tensor._version for tensor in _tensors(arguments)]
    results = op(*arguments)
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    learnt = [tensor for tensor in _tensors(arguments) if tensor.requires_grad]
    reached = [result for result in flat if isinstance(result, Tensor) and result.requires_grad]
    grads = torch.autograd.grad([result.sum() for result in reached], learnt) if reached else ()
    after = [tensor._version for tensor in _tensors(arguments)]
    written = [new - old for new, old in zip(after, before, strict=True)]
    return [*flat, *_tensors(arguments), *grads, *written]


def difference(found: list[Any], expected: list[Any]) -> str:
    """Compare the bits of all values. Return a description of the first difference, or "".

    All NaNs are equal to each other. 0.0 differs from -0.0.
    """
    if len(found) != len(expected):
        return f"{len(found)} values instead of {len(expected)}"
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if type(one) is not type(other) or one != other:
                return f"value {place} is {one!r} instead of {other!r}"
            continue
        if _described(one) != _described(other):
            return f"tensor {place} is {_described(one)} instead of {_described(other)}"
        bits = [t.detach().reshape(-1).view(torch.uint8) for t in (one, other) if t.numel()]
        if bits and not torch.equal(*bits):
            return f"tensor {place} has other values"
    return ""


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [argument for argument in arguments if isinstance(argument, Tensor)]
