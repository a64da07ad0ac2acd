"""The arguments of a call, separated into tensors, which autograd saves, and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchop._core.call import Call, replace_all


class _Placeholder:
    """Stands for a tensor among the arguments of a saved call."""


_PLACEHOLDER = _Placeholder()


class SavedCall(NamedTuple):
    """The arguments of a call, with placeholders for its tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_tensors(self, tensors: Sequence[Any]) -> Call:
        """The arguments, with these tensors, or what there is for each, in place of those."""
        rest = iter(tensors)
        return replace_all(self.args, self.kwargs, _Placeholder, lambda _: next(rest))


def split_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[SavedCall, list[Tensor]]:
    """The arguments of a call without its tensors, and the tensors."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Placeholder:
        tensors.append(tensor)
        return _PLACEHOLDER

    return SavedCall(*replace_all(args, kwargs, Tensor, take)), tensors


def of_each_tensor(values: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    """The entry of each tensor among the values; that of a list may stand for all in it."""
    flat: list[Any] = []
    # The dispatcher drops trailing arguments that equal their default, and `in_dims` has none then.
    for value, entry in zip(values, entries, strict=False):
        if isinstance(value, (list, tuple)):
            each = entry if isinstance(entry, (list, tuple)) else [entry] * len(value)
            flat += [e for item, e in zip(value, each, strict=True) if isinstance(item, Tensor)]
        elif isinstance(value, Tensor):
            flat.append(entry)
    return flat
