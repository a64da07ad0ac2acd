"""Separate the tensors of a call, which autograd saves, from the other arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchop._core.call import Call, replace_all


class _Placeholder:
    """Replaces a tensor in a saved call."""


_PLACEHOLDER = _Placeholder()


class SavedCall(NamedTuple):
    """The arguments of a call, with a placeholder in place of each tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_tensors(self, tensors: Sequence[Any]) -> Call:
        """Return the arguments, with the items of `tensors` in place of the placeholders."""
        rest = iter(tensors)
        return replace_all(self.args, self.kwargs, _Placeholder, lambda _: next(rest))


def split_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[SavedCall, list[Tensor]]:
    """Return the arguments with placeholders, and the tensors that the placeholders replace."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Placeholder:
        tensors.append(tensor)
        return _PLACEHOLDER

    return SavedCall(*replace_all(args, kwargs, Tensor, take)), tensors


def of_each_tensor(values: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    """Flatten a list with one entry per argument, such as `in_dims`, to have one entry per tensor.

    `values` contains the arguments. If an argument is a list of tensors, its entry may be a list
    too, or a single value that applies to all tensors in the list.
    """
    flat: list[Any] = []
    # `entries` may be shorter than `values`, because `in_dims` has no entries for trailing
    # arguments that equal their default.
    for value, entry in zip(values, entries, strict=False):
        if isinstance(value, (list, tuple)):
            each = entry if isinstance(entry, (list, tuple)) else [entry] * len(value)
            flat += [e for item, e in zip(value, each, strict=True) if isinstance(item, Tensor)]
        elif isinstance(value, Tensor):
            flat.append(entry)
    return flat
