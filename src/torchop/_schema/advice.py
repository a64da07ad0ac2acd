"""Suggest a supported annotation in the error message for an unsupported annotation."""

from __future__ import annotations

import collections.abc
import sys
import types as python_types
import typing
from typing import Any

import torch

from torchop._schema import types
from torchop._schema.kinds import argument_type

SUPPORTED = (
    "Tensor, int, float, bool, str, torch.types.Number, torch.dtype, torch.device, "
    "a list of tensors or numbers, or Optional of these"
)
ONE_PER_FIELD = "one argument per field"
RETURNABLE = "Tensor, list[Tensor], int, float, bool, torch.types.Number, a tuple of these, or None"

STRUCTURED_RETURNABLE = (
    f"{RETURNABLE}, a NamedTuple or dataclass of these and of strings, Enums, dtypes, devices and "
    "classes registered with torchop.opaque, and Optional, lists and dicts of all these"
)


def instead(annotation: Any, *, structures: bool = False) -> str:
    """Return the last sentence of an error message about an annotation: the suggested fix."""
    inner, _ = types.strip_optional(annotation)
    kind = typing.get_origin(inner) or inner
    if kind is collections.abc.Callable:
        return (
            "an operator cannot take functions: call the function before or after the operator, or "
            'select a function by name, with Literal["sum", "mean"]'
        )
    if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
        return "an operator cannot take modules: pass the tensors, such as module.weight"
    supported = (structures and _nearest_structure(inner)) or nearest(annotation)
    if supported == SUPPORTED and structures and _is_of_user(kind):
        return (
            f"supported are {SUPPORTED}, and your own classes if they are dataclasses or "
            "registered with torchop.opaque"
        )
    if supported in (SUPPORTED, ONE_PER_FIELD):
        return f"supported are {SUPPORTED}" if supported == SUPPORTED else f"pass {ONE_PER_FIELD}"
    return f"the nearest supported type is: {supported}"


def _is_of_user(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__.partition(".")[0] not in (
        *sys.stdlib_module_names,
        "torch",
    )


def _nearest_structure(annotation: Any) -> str | None:
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and Ellipsis not in items and any(item != items[0] for item in items):
        return "a NamedTuple"
    if (origin or annotation) in (dict, collections.abc.Mapping):
        named = "a dataclass"
        return named if torch.Tensor in items else f"a dict[str, float] or the like, or {named}"
    if origin is not None and len(items) == 1 and types.has_fields(items[0]):
        return "a dataclass of lists"
    return None


def nearest(annotation: Any) -> str:
    inner, optional = types.strip_optional(annotation)
    if types.has_fields(inner):
        return ONE_PER_FIELD
    supported = _nearest(inner)
    if supported is None:
        return SUPPORTED
    is_number = types.is_union(supported)
    text = "torch.types.Number" if is_number else types.spell(supported)
    if optional and argument_type(supported | None) is not None:
        return f"Optional[{text}]"
    return text


def _nearest(annotation: Any) -> Any | None:
    if argument_type(annotation) is not None:
        return annotation
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        kinds = {type(value) for value in args if value is not None}
        return _nearest(kinds.pop()) if len(kinds) == 1 else None
    if types.is_union(annotation):
        numeric = all(member in (int, float, bool, complex) for member in args)
        return torch.types.Number if numeric else None
    if hasattr(annotation, "__supertype__"):  # a NewType
        return _nearest(annotation.__supertype__)
    kind = origin or annotation
    if not isinstance(kind, type):
        return None
    for like, supported in _LIKE.items():
        if issubclass(kind, like):
            return supported
    if isinstance(kind, type(torch.FloatTensor)) or kind.__module__.partition(".")[0] == "numpy":
        return torch.Tensor
    return _nearest_list(args) if issubclass(kind, collections.abc.Iterable) else None


def _nearest_list(items: tuple[Any, ...]) -> Any:
    kinds = [types.strip_optional(item)[0] for item in items if item is not Ellipsis]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        return list[int]
    item = _nearest(kinds[0])
    if item is None:
        return list[int]
    # Schemas support neither lists of strings nor nested lists. Instead of such a list, suggest the
    # type of its items.
    listed = python_types.GenericAlias(list, (item,))
    return listed if argument_type(listed) is not None else item


# For a class and all its subclasses, the type to suggest instead. The first match wins. Tensor and
# bytes need an entry because they are iterable, and `_nearest` suggests a list for iterables.
_LIKE: dict[type, Any] = {
    torch.Tensor: torch.Tensor,
    int: int,
    float: float,
    str: str,
    bytes: str,
    complex: torch.types.Number,
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
    torch.layout: int,
    torch.memory_format: int,
}
