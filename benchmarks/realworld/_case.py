"""A call of an operator of somebody else's, and whether two runs of it did the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._schema.naming import OpName


class Case(NamedTuple):
    """A call of an operator.

    Attributes:
        op: its name, with the overload unless that is the default one.
        arguments: makes the arguments; equal ones each time it is called.
        label: what sets it apart from other calls of the operator.
    """

    op: str
    arguments: Callable[[], tuple[Any, ...]]
    label: str = ""


class Package(NamedTuple):
    """The operators of a package.

    Attributes:
        name: the package, as it is imported.
        namespaces: where it registers them.
        cases: at least one for each of its operators.
        left_out: why there is none, by the name of an operator that is accelerated.
        programs: what uses the operators through the package's own functions, by name; each
            returns everything that it computed, and the same each time.
    """

    name: str
    namespaces: tuple[str, ...]
    cases: Sequence[Case]
    left_out: Mapping[str, str] = {}
    programs: Mapping[str, Callable[[], list[Tensor]]] = {}


def overload(name: str) -> Any:
    """The operator, as packages call those of several overloads."""
    parsed = OpName.parse(name)
    packet = getattr(getattr(torch.ops, parsed.namespace), parsed.name)
    return getattr(packet, parsed.overload or "default")


def run(op: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Everything that can be seen of a call: results, what was written, versions, gradients."""
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
    """The first one, compared bit by bit; empty if there is none.

    Two NaNs are equal, 0.0 and -0.0 are not.
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
