"""Calls on DTensors, as sharding rules see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchop._compat.classes import OpOverload


class Row(NamedTuple):
    """Placements of all results and inputs of a call, on one dimension of a mesh.

    `reduction` says how results are combined whose parts were computed on the ranks, if they are.
    """

    results: list[Any]
    inputs: list[Any]
    reduction: str | None = None


class TensorInfo(NamedTuple):
    """What is known of a tensor, or of a result, before a call: that of all ranks together."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Input(NamedTuple):
    """One tensor of a call, and the number of the argument that holds it."""

    argument: int
    info: TensorInfo
    is_written: bool


class Call(NamedTuple):
    """A call as rules see it, with a `TensorInfo` in the place of each tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Input]
    results: list[TensorInfo]
    mesh: Any


Rows = Callable[[Call], Sequence[Row]]


def is_one(size: Any) -> bool:
    """Whether a size is 1, as far as it is known; compilers add no guard for the question."""
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(size == 1))


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes may be the same."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(left == right))


def holds_tensors(argument: Any) -> bool:
    """Whether an argument of a schema is a tensor, or a list of tensors."""
    return "Tensor" in str(argument.real_type)


def is_written(argument: Any) -> bool:
    """Whether the schema says that an operator writes into an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def first_hashed(op: OpOverload, unhashed: Sequence[str]) -> int | None:
    """The number of the first positional argument that goes into the key; all behind it do."""
    for index, argument in enumerate(op._schema.arguments):
        is_hashed = not holds_tensors(argument) and argument.name not in unhashed
        if is_hashed and not argument.kwarg_only:
            return index
    return None
