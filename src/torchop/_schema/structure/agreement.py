"""Check that kernels return the same structure as the fake kernel for the same arguments.

The fake kernel decides which results are None, how long lists are, and the values of everything
that is not a tensor. In compiled code, these decisions become constants. The graph never
compares them with the results of the real kernel, so the kernel's wrapper must do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import fake_tensors, opaque_types, traced_objects
from torchop._errors import ResultError, short_text
from torchop._schema.structure.result_nodes import Described

_MOST = 256  # limits memory use; few programs trace one operator with more distinct arguments


class Decisions:
    """The decisions of an operator's fake kernel in traced calls, such as which results are None.

    Attributes:
        made: maps arguments to decisions. It stays empty until a call is traced.
    """

    def __init__(
        self, op: object, places: Sequence[str], layout_of: Callable[[int], list[tuple[str, Any]]]
    ) -> None:
        self._op = op
        self._places = places
        self._layout_of = layout_of
        self.made: dict[Any, list[tuple[str, Any]]] = {}

    def record(self, args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        key = _key(args)
        if key is None:
            return
        while len(self.made) >= _MOST:
            self.made.pop(next(iter(self.made)), None)
        self.made[key] = self._decided(results)

    def check(self, args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        expected = self.made.get(_key(args))
        if expected is None:
            return
        for (place, made), (_, found) in zip(expected, self._decided(results), strict=True):
            if made is not _UNKNOWN and found is not _UNKNOWN and repr(made) != repr(found):
                raise self._error(place, made, found)

    def _decided(self, results: tuple[Any, ...]) -> list[tuple[str, Any]]:
        # Compare the layout (the parts of the result that are not tensors) first, because it
        # determines which structures are None.
        decided = self._layout_of(results[-1]) if len(results) > len(self._places) else []
        return [*decided, *zip(self._places, map(_decision, results), strict=False)]

    def _error(self, place: str, made: Any, found: Any) -> ResultError:
        return ResultError(
            f"{self._op}: {place} is {short_text(repr(found))}, but the fake kernel returned "
            f"{short_text(repr(made))} for the same shapes and values. Compiled code relies on the "
            "fake kernel, so return the same from both. A value that depends on data must be a "
            "tensor."
        )


_UNKNOWN = object()


def _decision(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Described("a tensor")
    if isinstance(value, (list, tuple)):
        return Described(f"a list of {len(value)}")
    if opaque_types.is_by_reference(traced_objects.class_of(value)):
        return Described("an object")
    return _UNKNOWN if isinstance(value, torch.SymInt) else value


def _key(args: tuple[Any, ...]) -> Any:
    """Return a hashable key of all that a fake kernel may depend on, or None if there is none."""
    try:
        key = tuple(map(_part, args))
        hash(key)
    except (TypeError, ValueError):
        return None
    return key


def _part(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.device.type, tuple(map(_part, value.shape))
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    if isinstance(value, torch.SymInt):
        value = fake_tensors.number_of(value)
        if value is None:  # it depends on data
            raise ValueError
    cls = traced_objects.class_of(value)
    if opaque_types.is_by_reference(cls):
        return cls  # the key must not keep the object alive
    return type(value), value
