from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from torchop._schema.signatures import shorten

_Entry = TypeVar("_Entry")

SEQUENCES = (list, collections.abc.Sequence)


def find(table: Mapping[Any, _Entry], annotation: Any) -> _Entry | None:
    try:
        return table.get(annotation)
    except TypeError:
        return None


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def strip_optional(annotation: Any) -> tuple[Any, bool]:
    """Return `(X, True)` for `X | None`, and `(annotation, False)` for other annotations."""
    if not is_union(annotation):
        return annotation, False
    members = typing.get_args(annotation)
    rest = tuple(member for member in members if member is not type(None))
    if len(rest) == len(members) or not rest:
        return annotation, False
    return typing.Union[rest], True  # noqa: UP007  (the members are known only at run time)


def has_fields(annotation: Any) -> bool:
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and (
        issubclass(kind, collections.abc.Mapping)
        or dataclasses.is_dataclass(kind)
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


def spell(annotation: Any) -> str:
    """Format an annotation for an error message, without `typing.` and with long text shortened."""
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
