"""The arguments of a call, with its tensors apart from the rest: autograd only saves tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchop._schema.schema import Argument


class _Place:
    """Stands where a tensor was."""


_PLACE = _Place()


class SavedCall(NamedTuple):
    """The arguments of a call without its tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with tensors in the places of those that were taken out."""
        rest = iter(tensors)
        return (
            tuple(_replaced(value, _is_place, lambda _: next(rest)) for value in self.args),
            {k: _replaced(v, _is_place, lambda _: next(rest)) for k, v in self.kwargs.items()},
        )


def taken_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[SavedCall, list[Tensor]]:
    """The arguments without their tensors, and the tensors."""
    tensors: list[Tensor] = []

    def take(tensor: Any) -> _Place:
        tensors.append(tensor)
        return _PLACE

    saved = SavedCall(
        tuple(_replaced(value, _is_tensor, take) for value in args),
        {name: _replaced(value, _is_tensor, take) for name, value in kwargs.items()},
    )
    return saved, tensors


def flags_of_tensors(args: Sequence[Any], flags: Sequence[Any]) -> list[bool]:
    """Of flags in the structure of the arguments, those that belong to tensors, in their order."""
    flat: list[bool] = []
    for value, flag in zip(args, flags, strict=False):
        if isinstance(value, (list, tuple)) and isinstance(flag, (list, tuple)):
            flat += [f for item, f in zip(value, flag, strict=True) if isinstance(item, Tensor)]
        elif isinstance(value, Tensor):
            flat.append(flag)
    return flat


def structured(
    arguments: Sequence[Argument], args: Sequence[Any], flat: Sequence[Any]
) -> tuple[Any, ...]:
    """The values of `flat`, one for each tensor of `args`, in the structure of `args`."""
    rest = iter(flat)

    def place(argument: Argument, value: Any) -> Any:
        if argument.is_tensor_list and value is not None:
            return [next(rest) if isinstance(item, Tensor) else None for item in value]
        return next(rest) if isinstance(value, Tensor) else None

    return tuple(map(place, arguments, args))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_place(value: Any) -> bool:
    return value is _PLACE


def _replaced(value: Any, wanted: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    if wanted(value):
        return replace(value)
    if isinstance(value, (list, tuple)) and any(map(wanted, value)):
        return [replace(item) if wanted(item) else item for item in value]
    return value
