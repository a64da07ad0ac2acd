"""Which Python types a schema can express, and what to suggest for the others.

The table is that of the newest PyTorch, on every supported one: older releases parse the same
schemas, only their inference is narrower.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any, NamedTuple

import torch

from torchop import _compat


class _Base(NamedTuple):
    """A type that a schema knows, and the containers it may stand in."""

    schema: str
    listed: bool = False  # T[]
    optional_listed: bool = False  # T?[]
    listed_optional: bool = False  # T[]?


_BASES: dict[Any, _Base] = {
    torch.Tensor: _Base("Tensor", listed=True, optional_listed=True, listed_optional=True),
    int: _Base("SymInt", listed=True, listed_optional=True),
    float: _Base("float", listed=True, listed_optional=True),
    bool: _Base("bool", listed=True, listed_optional=True),
    str: _Base("str"),
    torch.dtype: _Base("ScalarType"),
    torch.device: _Base("Device"),
}
_NUMBER = _Base("Scalar", listed=True)
_NUMBER_MEMBERS = frozenset({int, float, bool})
_SEQUENCES = (list, collections.abc.Sequence)
_RETURNS: dict[Any, str] = {torch.Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool"}

SUPPORTED = (
    "Tensor, int, float, bool, str, torch.types.Number, torch.dtype, torch.device, "
    "a list of tensors or numbers, or Optional of these"
)
RETURNABLE = "Tensor, list[Tensor], int, float, bool, torch.types.Number, a tuple of these, or None"


def argument_type(annotation: Any) -> str | None:
    """The schema type of an argument's annotation, or None if a schema cannot express it."""
    if isinstance(annotation, type) and annotation in _BASES:
        return _BASES[annotation].schema  # most of them
    inner, optional = _strip_optional(annotation)
    item = _list_item(inner)
    if item is None:
        base = _base(inner)
        if base is not None:
            return base.schema + "?" * optional
        return None if optional else _compat.custom_class_name(inner)
    item, item_optional = _strip_optional(item)
    base = _base(item)
    if base is None or not base.listed:
        return None
    if (item_optional and not base.optional_listed) or (optional and not base.listed_optional):
        return None
    return f"{base.schema}{'?' * item_optional}[]{'?' * optional}"


def return_type(annotation: Any) -> str | None:
    """The schema type of a return annotation, or None if a schema cannot express it."""
    if annotation is None or annotation is type(None):
        return "()"
    if typing.get_origin(annotation) is tuple:
        items = [_single_return_type(item) for item in typing.get_args(annotation)]
        if any(item is None for item in items):
            return None
        text = ", ".join(typing.cast("list[str]", items))
        # One result in parentheses means that result itself; a tuple of one takes two pairs.
        return f"(({text}))" if len(items) == 1 else f"({text})"
    return _single_return_type(annotation)


def _single_return_type(annotation: Any) -> str | None:
    if _is_number(annotation):
        return _NUMBER.schema
    if typing.get_origin(annotation) is list and typing.get_args(annotation) == (torch.Tensor,):
        return "Tensor[]"
    if isinstance(annotation, typing.Hashable) and annotation in _RETURNS:
        return _RETURNS[annotation]
    if _compat.is_returnable_custom_class(annotation):
        return _compat.custom_class_name(annotation)
    return None


def _base(annotation: Any) -> _Base | None:
    if _is_number(annotation):
        return _NUMBER
    if _compat.is_group_name(annotation):
        return _BASES[str]
    return _BASES.get(annotation) if isinstance(annotation, typing.Hashable) else None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_number(annotation: Any) -> bool:
    return _is_union(annotation) and set(typing.get_args(annotation)) == _NUMBER_MEMBERS


def _strip_optional(annotation: Any) -> tuple[Any, bool]:
    """Splits `X | None` into X and True."""
    if not _is_union(annotation):
        return annotation, False
    members = typing.get_args(annotation)
    rest = tuple(member for member in members if member is not type(None))
    if len(rest) == len(members) or not rest:
        return annotation, False
    return typing.Union[rest], True  # noqa: UP007  (the members are only known here)


def _list_item(annotation: Any) -> Any | None:
    """The X of `list[X]` or `Sequence[X]`."""
    args = typing.get_args(annotation)
    return args[0] if typing.get_origin(annotation) in _SEQUENCES and args else None


def spell(annotation: Any) -> str:
    """An annotation as its author wrote it, short enough for a message."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        module = annotation.__module__
        text = (
            annotation.__qualname__
            if module == "builtins"
            else f"{module}.{annotation.__qualname__}"
        )
    else:
        text = str(annotation)
    text = text.replace("typing.", "").replace("collections.abc.", "")
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(annotation: Any) -> str:
    """What to write instead of an annotation that a schema cannot express."""
    inner, optional = _strip_optional(annotation)
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    suggestion = _nearest_container(inner, origin, args) or _nearest_scalar(inner, origin, args)
    return f"Optional[{suggestion}]" if optional and "," not in suggestion else suggestion


def _nearest_container(inner: Any, origin: Any, args: tuple[Any, ...]) -> str | None:
    container = origin or inner
    if container in (dict, collections.abc.Mapping) or dataclasses.is_dataclass(inner):
        return "one argument per field"
    iterables = (list, tuple, set, frozenset, *_SEQUENCES, collections.abc.Iterable)
    if container not in iterables and not (
        isinstance(container, type) and issubclass(container, tuple)
    ):
        return None
    if inner is torch.Size:
        return "list[int]"
    items = {item for item in args if item is not Ellipsis}
    if len(items) == 1:
        (item,) = items
        if argument_type(list[item]) is not None:  # type: ignore[valid-type]
            return f"list[{spell(item)}]"
        if item is str:
            return "str"
    return "list[int] or list[Tensor]"


def _nearest_scalar(inner: Any, origin: Any, args: tuple[Any, ...]) -> str:
    if origin is typing.Literal:
        members = {type(value) for value in args}
        return spell(members.pop()) if len(members) == 1 else "str"
    if _is_union(inner) and set(args) <= {int, float, bool, complex}:
        return "torch.types.Number"
    if not isinstance(inner, type):
        return SUPPORTED
    if issubclass(inner, torch.Tensor) or inner.__module__.partition(".")[0] == "numpy":
        return "torch.Tensor"
    by_type: dict[type, str] = {
        complex: "torch.types.Number",
        bytes: "str",
        torch.SymInt: "int",
        torch.SymFloat: "float",
        torch.SymBool: "bool",
        torch.layout: "int",
        torch.memory_format: "int",
    }
    return by_type.get(inner, SUPPORTED)
