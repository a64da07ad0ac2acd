"""DTensor: whether it is in use, and calls on it as sharding rules see them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchop._compat import import_hooks
from torchop._compat.classes import tree_leaves as tree_leaves

_MODULE = "torch.distributed.tensor"


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


def when_imported(callback: Callable[[], None]) -> None:
    """Calls `callback` when DTensor is there, which torchop does not import."""
    import_hooks.when_imported(_MODULE, callback)


def is_imported() -> bool:
    """Whether DTensor can be in use."""
    module = sys.modules.get(_MODULE)
    return module is not None and hasattr(module, "DTensor")


def has_dtensors(values: Any) -> bool:
    """Whether there is a DTensor among values that are in tuples, lists and dicts."""
    if not is_imported():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in tree_leaves(values))


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; a plain tensor as it is."""
    return value.full_tensor() if has_dtensors(value) else value  # type: ignore[attr-defined]


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
