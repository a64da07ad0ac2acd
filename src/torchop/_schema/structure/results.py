"""The tree of a result: tensors, which the flat operator returns, and values, which it does not."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchop._errors import ResultError, SchemaError
from torchop._schema import types
from torchop._schema.structure.build import (
    Field,
    UnsupportedTypeError,
    fields_of_dataclass,
    fields_of_named_tuple,
)
from torchop._schema.structure.source import Source


class Result:
    """A result, or a part of one, at one place.

    It is what a flat schema can say: a tensor that may be missing, or several in a list or tuple.
    Or it is a value that follows from the metadata of the inputs, such as a list of numbers.

    Attributes:
        where: how messages name the place: `lib::sort: the result's field values`.
        schema: the schema type of what holds tensors; None for a value.
        is_tuple: whether several tensors are in a tuple.
    """

    def __init__(self, where: str, schema: str | None = None, *, is_tuple: bool = False) -> None:
        self.where = where
        self.schema = schema
        self.is_tuple = is_tuple

    def flat(self) -> Iterator[str]:
        """The schema types of the tensors in it."""
        if self.schema is not None:
            yield self.schema

    def value_places(self) -> Iterator[str]:
        """How messages name the values in it."""
        if self.schema is None:
            yield self.where.partition(": ")[2]

    def flatten(self, source: Source, value: str, tensors: list[str], values: list[str]) -> None:
        """Writes what takes `value` apart; appends the expressions of tensors, and of the rest."""
        (values if self.schema is None else tensors).append(value)

    def rebuild(self, tensors: Iterator[str], values: Iterator[str], source: Source) -> str:
        """The expression that makes the result again."""
        value = next(values if self.schema is None else tensors)
        return f"{source.object(tuple)}({value})" if self.is_tuple else value

    def gather(self, tensors: Iterator[Any]) -> Any:
        """What there is for each tensor, such as gradients, in the structure of the result."""
        return None if self.schema is None else next(tensors)

    def spread(self, value: Any) -> list[Any]:
        """The reverse: what there is for each tensor, from a structure, or from one for all."""
        return [] if self.schema is None else [value]


class Several(Result):
    """A tuple, a NamedTuple or a dataclass of results."""

    def __init__(self, where: str, cls: type, parts: Mapping[str, Result]) -> None:
        super().__init__(where, is_tuple=cls is tuple)
        self.cls = cls
        self.parts = parts

    def flat(self) -> Iterator[str]:
        for part in self.parts.values():
            yield from part.flat()

    def value_places(self) -> Iterator[str]:
        for part in self.parts.values():
            yield from part.value_places()

    def flatten(self, source: Source, value: str, tensors: list[str], values: list[str]) -> None:
        if self.is_tuple:
            check = source.object(check_tuple)
            source.line(f"{check}({value}, {len(self.parts)}, {self.where!r})")
        else:
            source.require_class(value, self.cls, self.where, wrong_result)
        for index, (name, part) in enumerate(self.parts.items()):
            local = source.variable(f"{value}_{name}")
            item = f"{value}[{index}]" if self.is_tuple else source.attribute(value, name)
            source.line(f"{local} = {item}")
            part.flatten(source, local, tensors, values)

    def rebuild(self, tensors: Iterator[str], values: Iterator[str], source: Source) -> str:
        parts = {name: part.rebuild(tensors, values, source) for name, part in self.parts.items()}
        if self.is_tuple:
            return f"({', '.join(parts.values())},)"
        return f"{source.object(self.cls)}({source.keywords(parts)})"

    def gather(self, tensors: Iterator[Any]) -> Any:
        parts = {name: part.gather(tensors) for name, part in self.parts.items()}
        if self.is_tuple:
            return tuple(parts.values())
        if not dataclasses.is_dataclass(self.cls):
            return self.cls(**parts)
        # Its own code expects results, not what there is for each of them.
        result = object.__new__(self.cls)
        for name, value in parts.items():
            object.__setattr__(result, name, value)
        return result

    def spread(self, value: Any) -> list[Any]:
        if isinstance(value, Mapping):
            items = [value.get(name) for name in self.parts]
        elif type(value) is self.cls and not self.is_tuple:
            items = [getattr(value, name) for name in self.parts]
        elif isinstance(value, (tuple, list)) and len(value) == len(self.parts):
            items = list(value)
        else:
            items = [value] * len(self.parts)  # one for all of them
        pairs = zip(self.parts.values(), items, strict=True)
        return [flat for part, item in pairs for flat in part.spread(item)]


def build_result(annotation: Any, where: str, inside: tuple[Any, ...] = ()) -> Result:
    """The tree of a result, or of a part of one that is inside other structures."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    inner, optional = types.strip_optional(annotation)
    if inner is torch.Tensor:
        return Result(where, "Tensor?" if optional else "Tensor")
    if origin is list and args == (torch.Tensor,):
        return Result(where, "Tensor[]")
    if origin is tuple and args == (torch.Tensor, Ellipsis):
        return Result(where, "Tensor[]", is_tuple=True)
    if _is_value(annotation):
        return Result(where)
    fields = _fields(annotation)
    if fields is None:
        raise UnsupportedTypeError("return", annotation)
    if annotation in inside:
        raise SchemaError(
            f"{where} is a {types.spell(annotation)} inside a {types.spell(annotation)}, so "
            "the schema would have no end. Return the inner ones in another way."
        )
    parts = {}
    for name, field in fields.items():
        place = f"{where}[{name}]" if origin is tuple else f"{where}.{name}"
        parts[name] = build_result(field.annotation, place, (*inside, annotation))
    return Several(where, origin or annotation, parts)


def _fields(annotation: Any) -> dict[str, Field] | None:
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and args and Ellipsis not in args:
        return {str(index): Field(item) for index, item in enumerate(args)}
    if not isinstance(annotation, type):
        return None
    if dataclasses.is_dataclass(annotation):
        fields = fields_of_dataclass(annotation)
        for field in dataclasses.fields(annotation):
            if field.name in fields and not field.init:
                raise SchemaError(
                    f"{types.spell(annotation)} cannot be a result: its __init__ does not take the "
                    f"field {field.name!r}, so the object cannot be rebuilt. Let __init__ take it, "
                    "or compute the field in __post_init__."
                )
        return fields
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        return fields_of_named_tuple(annotation)
    return None


_VALUES = (int, float, bool, str, torch.dtype, torch.device, torch.Size)


def _is_value(annotation: Any) -> bool:
    inner, _ = types.strip_optional(annotation)
    if inner in _VALUES:
        return True
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if origin in (list, tuple) and args:
        return all(item is Ellipsis or _is_value(item) for item in args)
    return types.is_union(inner) and all(_is_value(item) for item in args)


def check_tuple(value: Any, length: int, where: str) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != length:
        raise wrong_result(where, f"a tuple of {length}", value)


def wrong_result(where: str, expected: str, value: Any) -> ResultError:
    returned = f"a {types.spell(type(value))}"
    if isinstance(value, (tuple, list)):
        returned += f" of {len(value)}"
    return ResultError(f"{where}: expected {expected}, but the function returned {returned}.")
