"""Split the arguments of a call into tensors, which autograd saves, and everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchop._core.call import Call, replace_all


class _Placeholder:
    """Marks the position of a tensor in a saved call."""


_PLACEHOLDER = _Placeholder()


class SavedCall(NamedTuple):
    """The arguments of a call, with placeholders in place of tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_tensors(self, tensors: Sequence[Any]) -> Call:
        """Return the arguments with `tensors` (or any value per tensor) in the placeholders."""
        rest = iter(tensors)
        return replace_all(self.args, self.kwargs, _Placeholder, lambda _: next(rest))


def split_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[SavedCall, list[Tensor]]:
    """Return the arguments without tensors, and the tensors."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Placeholder:
        tensors.append(tensor)
        return _PLACEHOLDER

    return SavedCall(*replace_all(args, kwargs, Tensor, take)), tensors


def of_each_tensor(values: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    """Return one entry per tensor in `values`. The entry of a list may apply to all its tensors."""
    flat: list[Any] = []
    # `in_dims` is shorter than the schema: the dispatcher strips trailing default arguments.
    for value, entry in zip(values, entries, strict=False):
        if isinstance(value, (list, tuple)):
            each = entry if isinstance(entry, (list, tuple)) else [entry] * len(value)
            flat += [e for item, e in zip(value, each, strict=True) if isinstance(item, Tensor)]
        elif isinstance(value, Tensor):
            flat.append(entry)
    return flat
