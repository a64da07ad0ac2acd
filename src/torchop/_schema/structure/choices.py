"""Literal and Enum: one of a few values, of which a graph shows which."""

from __future__ import annotations

import enum
import typing
from typing import Any

import torch

from torchop._errors import ArgumentValueError, short_repr
from torchop._schema import types
from torchop._schema.structure.kinds import Kind, wrong_type

_SCHEMAS = {str: "str", int: "SymInt", bool: "bool"}


def choice_kind(annotation: Any) -> Kind | None:
    """The kind of a Literal or an Enum class; None if the annotation is neither."""
    if typing.get_origin(annotation) is typing.Literal:
        return _literal(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _flags(annotation) if issubclass(annotation, enum.Flag) else _members(annotation)
    return None


def _literal(values: tuple[Any, ...]) -> Kind | None:
    choices = tuple(value for value in values if value is not None)
    classes = {type(value) for value in choices}
    if len(classes) != 1:
        return None  # their order would be all that a graph could show
    (cls,) = classes
    if issubclass(cls, enum.Enum):
        whole = choice_kind(cls)
        return None if whole is None or issubclass(cls, enum.Flag) else _some(whole, choices)
    schema = _SCHEMAS.get(cls)
    if schema is None:
        return None
    accepted = (int, torch.SymInt) if cls is int else cls
    expected = _expected(choices)

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, accepted):
            raise wrong_type(where, expected, value)
        for choice in choices:
            if value == choice:
                return choice  # the value itself may be a symbol
        raise ArgumentValueError(f"{where}: expected {expected}, got {short_repr(value)}.")

    return Kind(schema, check, decode=check, is_optional=None in values)


def _members(cls: type[enum.Enum]) -> Kind:
    # By name: values may be any objects, and are renumbered more easily than members are renamed.
    members = dict(cls.__members__)
    expected = _expected(tuple(members))

    def encode(value: Any, where: str) -> str:
        if not isinstance(value, cls):
            raise wrong_type(where, types.spell(cls), value)
        return value.name

    def decode(name: Any, where: str) -> Any:
        if name not in members:
            raise ArgumentValueError(f"{where}: expected {expected}, got {short_repr(name)}.")
        return members[name]

    return Kind("str", encode, decode=decode)


def _some(whole: Kind, choices: tuple[Any, ...]) -> Kind:
    expected = _expected(tuple(choice.name for choice in choices))
    decode_any = whole.decode
    assert decode_any is not None  # members are decoded from their names

    def encode(value: Any, where: str) -> Any:
        name = whole.encode(value, where)
        if value not in choices:
            raise ArgumentValueError(f"{where}: expected {expected}, got {short_repr(name)}.")
        return name

    def decode(name: Any, where: str) -> Any:
        value = decode_any(name, where)
        if value not in choices:
            raise ArgumentValueError(f"{where}: expected {expected}, got {short_repr(name)}.")
        return value

    return Kind("str", encode, decode=decode)


def _flags(cls: type[enum.Flag]) -> Kind:
    def encode(value: Any, where: str) -> int:
        if not isinstance(value, cls):
            raise wrong_type(where, types.spell(cls), value)
        return int(value.value)  # a combination has no name

    def decode(value: Any, where: str) -> Any:
        try:
            return cls(int(value))
        except ValueError as error:
            raise ArgumentValueError(f"{where}: {error}.") from None

    return Kind("SymInt", encode, decode=decode)


def _expected(choices: tuple[Any, ...]) -> str:
    return f"one of {', '.join(map(repr, choices))}"
