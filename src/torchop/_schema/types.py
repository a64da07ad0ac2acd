"""Which Python types a schema can express, and what to suggest for the others.

The table is that of the newest PyTorch, for every supported release. Older releases parse the same
schemas, but infer fewer types.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from torchop._compat import schemas
from torchop._schema.signatures import shorten
from torchop._schema.text import write_results

_Entry = TypeVar("_Entry")


_BASES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
}
_LISTS = frozenset(
    {"Tensor[]", "Tensor?[]", "Tensor[]?", "Tensor?[]?", "Scalar[]"}
    | {f"{item}{suffix}" for item in ("SymInt", "float", "bool") for suffix in ("[]", "[]?")}
)
_RETURNS = frozenset({"Tensor", "SymInt", "float", "bool", "Scalar"})
_NUMBER_MEMBERS = frozenset({int, float, bool})
SEQUENCES = (list, collections.abc.Sequence)

SUPPORTED = (
    "Tensor, int, float, bool, str, torch.types.Number, torch.dtype, torch.device, "
    "a list of tensors or numbers, or Optional of these"
)
ONE_PER_FIELD = "one argument per field"
RETURNABLE = "Tensor, list[Tensor], int, float, bool, torch.types.Number, a tuple of these, or None"


def argument_type(annotation: Any) -> str | None:
    """The schema type of an argument's annotation, or None if a schema cannot express it."""
    schema_type = find(_KNOWN, annotation)
    if schema_type is None:
        schema_type = _argument_type(annotation)
        # None is not kept: a class that a schema cannot express may become a custom class later.
        if schema_type is not None and isinstance(annotation, typing.Hashable):
            _KNOWN[annotation] = schema_type
    return schema_type


_KNOWN: dict[Any, str] = {}


def parameter_type(parameter: inspect.Parameter) -> str | None:
    """The schema type of a parameter, or None if a schema cannot express it."""
    schema_type = argument_type(parameter.annotation)
    if schema_type is not None and parameter.default is None and not schema_type.endswith("?"):
        # `x: Tensor = None` says Optional[Tensor] without saying it, as PEP 484 once allowed.
        schema_type += "?"
    return schema_type


def _argument_type(annotation: Any) -> str | None:
    inner, optional = strip_optional(annotation)
    item = _list_item(inner)
    if item is None:
        base = _base(inner)
        if base is not None:
            return base + "?" * optional
        return None if optional else schemas.custom_class_name(inner)
    item, item_optional = strip_optional(item)
    text = f"{_base(item)}{'?' * item_optional}[]{'?' * optional}"
    return text if text in _LISTS else None


def return_type(annotation: Any) -> str | None:
    """The schema type of a return annotation, or None if a schema cannot express it."""
    if annotation is None or annotation is type(None):
        return "()"
    if typing.get_origin(annotation) is tuple:
        items = [_single_return_type(item) for item in typing.get_args(annotation)]
        if None in items:
            return None
        results = typing.cast("list[str]", items)
        # A tuple of one is a result itself, of the type tuple.
        return write_results([f"({results[0]})"] if len(results) == 1 else results)
    return _single_return_type(annotation)


def _single_return_type(annotation: Any) -> str | None:
    if annotation is torch.Tensor:
        return "Tensor"  # as most are
    if typing.get_origin(annotation) is list and typing.get_args(annotation) == (torch.Tensor,):
        return "Tensor[]"
    text = _base(annotation)
    if text in _RETURNS:
        return text
    if schemas.is_returnable_custom_class(annotation):
        return schemas.custom_class_name(annotation)
    return None


def _base(annotation: Any) -> str | None:
    if _is_number(annotation):
        return "Scalar"
    return "str" if schemas.is_group_name(annotation) else find(_BASES, annotation)


def find(table: Mapping[Any, _Entry], annotation: Any) -> _Entry | None:
    """The entry for an annotation, if there is one."""
    try:
        return table.get(annotation)
    except TypeError:  # an annotation may be any object, and need not have a hash
        return None


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_number(annotation: Any) -> bool:
    return is_union(annotation) and set(typing.get_args(annotation)) == _NUMBER_MEMBERS


def strip_optional(annotation: Any) -> tuple[Any, bool]:
    """Splits `X | None` into X and True."""
    if not is_union(annotation):
        return annotation, False
    members = typing.get_args(annotation)
    rest = tuple(member for member in members if member is not type(None))
    if len(rest) == len(members) or not rest:
        return annotation, False
    return typing.Union[rest], True  # noqa: UP007  (the members are only known here)


def _list_item(annotation: Any) -> Any | None:
    """The X of `list[X]` or `Sequence[X]`."""
    args = typing.get_args(annotation)
    return args[0] if typing.get_origin(annotation) in SEQUENCES and args else None


def spell(annotation: Any) -> str:
    """An annotation as its author wrote it, short enough for a message."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        module = annotation.__module__
        text = annotation.__qualname__
        if module != "builtins":
            text = f"{module}.{text}"
    else:
        text = str(annotation)
    for prefix in ("typing.", "collections.abc."):
        text = text.replace(prefix, "")
    return shorten(text.replace("torch._C.", "torch."))


def instead(annotation: Any, supported: str) -> str:
    """What to do about an annotation of which the nearest type is `supported`."""
    inner, _ = strip_optional(annotation)
    kind = typing.get_origin(inner) or inner
    if kind is collections.abc.Callable:
        return (
            "an operator takes no functions: call it before or after the operator, or choose one "
            'by its name, with Literal["sum", "mean"]'
        )
    if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
        return "an operator takes no modules: pass the tensors that it needs, such as the weight"
    if supported in (SUPPORTED, ONE_PER_FIELD):
        return f"supported are {SUPPORTED}" if supported == SUPPORTED else f"pass {ONE_PER_FIELD}"
    return f"the nearest supported type is: {supported}"


def nearest(annotation: Any) -> str:
    """What to write instead of an annotation that a schema cannot express."""
    inner, optional = strip_optional(annotation)
    if has_fields(inner):
        return ONE_PER_FIELD
    supported = _nearest(inner)
    if supported is None:
        return SUPPORTED
    text = "torch.types.Number" if _is_number(supported) else spell(supported)
    if optional and argument_type(supported | None) is not None:
        return f"Optional[{text}]"
    return text


def has_fields(annotation: Any) -> bool:
    """Whether it is a dataclass, a NamedTuple or a mapping."""
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and (
        issubclass(kind, collections.abc.Mapping)
        or dataclasses.is_dataclass(kind)
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


def _nearest(annotation: Any) -> Any | None:
    """The supported annotation that is most like this one, or None if none is like it."""
    if argument_type(annotation) is not None:
        return annotation
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        kinds = {type(value) for value in args if value is not None}
        return _nearest(kinds.pop()) if len(kinds) == 1 else None
    if is_union(annotation):
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
    kinds = [strip_optional(item)[0] for item in items if item is not Ellipsis]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        return list[int]
    item = _nearest(kinds[0])
    if item is None:
        return list[int]
    # A schema has no list of strings or of lists: one item is nearer than a list of other items.
    listed = types.GenericAlias(list, (item,))
    return listed if argument_type(listed) is not None else item


# The first class that fits counts; tensors and bytes, which are iterable, are not like lists.
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
