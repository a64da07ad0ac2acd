"""The data that sharding rules work with: a call, its tensors, and their placements.

A sharding rule is a function that receives a `Call` and returns `Row` objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchop._compat.classes import OpOverload


class Row(NamedTuple):
    """A valid combination of placements for all tensors of a call, on one mesh dimension.

    `reduction` is the operation that combines the ranks' partial results, such as "sum", or None if
    the ranks compute no partial results.
    """

    results: list[Any]
    inputs: list[Any]
    reduction: str | None = None


class TensorInfo(NamedTuple):
    """The global shape, stride and dtype of an input tensor or a result."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def meta(self) -> Any:
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        return TensorMeta(torch.Size(self.shape), tuple(self.stride), self.dtype)


class Input(NamedTuple):
    """An input tensor of a call, with the index of the schema argument that contains it."""

    argument: int
    info: TensorInfo
    is_written: bool


class Call(NamedTuple):
    """A call on DTensors, with each tensor replaced by a `TensorInfo`.

    `inputs` lists all tensors in the arguments, including those inside lists.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Input]
    results: list[TensorInfo]
    mesh: Any


Rows = Callable[[Call], Sequence[Row]]


def is_one(size: Any) -> bool:
    """Return whether a size is known to be 1, without adding a guard if the size is symbolic."""
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(size == 1))


def same_size(left: Any, right: Any) -> bool:
    """Return False if two sizes are known to differ. Add no guard if they are symbolic."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(left == right))


def holds_tensors(argument: Any) -> bool:
    return "Tensor" in str(argument.real_type)


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def first_hashed(op: OpOverload, unhashed: Sequence[str]) -> int | None:
    """Return the index of the first positional argument that belongs in DTensor's cache keys.

    All non-tensor arguments belong there, except the arguments in `unhashed`, which do not affect
    the placements.
    """
    for index, argument in enumerate(op._schema.arguments):
        is_hashed = not holds_tensors(argument) and argument.name not in unhashed
        if is_hashed and not argument.kwarg_only:
            return index
    return None
