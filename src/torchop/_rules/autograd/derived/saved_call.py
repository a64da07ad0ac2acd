"""Separate the tensors of a call, which autograd saves, from the other arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchop._core.call import Call, replace_all


class _Placeholder:
    """The placeholder that replaces a tensor in a saved call."""


_PLACEHOLDER = _Placeholder()


class SavedCall(NamedTuple):
    """The arguments of a call, in which each tensor is replaced with a placeholder."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_tensors(self, tensors: Sequence[Any]) -> Call:
        """Return the arguments with each placeholder replaced with the next item of `tensors`."""
        rest = iter(tensors)
        return replace_all(self.args, self.kwargs, _Placeholder, lambda _: next(rest))


def split_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[SavedCall, list[Tensor]]:
    """Replace the tensors in the arguments of a call with placeholders.

    Returns:
        The arguments with placeholders and the tensors that were replaced.
    """
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Placeholder:
        tensors.append(tensor)
        return _PLACEHOLDER

    return SavedCall(*replace_all(args, kwargs, Tensor, take)), tensors


def of_each_tensor(values: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    """Convert a list with an entry for each value to a list with an entry for each tensor.

    Args:
        values: the arguments or results of a call. Some of them may be lists of tensors.
        entries: one entry for each value, such as the `in_dims` of a vmap rule. The entry for a
            list of tensors may be a list of entries, or one entry that applies to all tensors.
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
