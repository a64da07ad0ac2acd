"""Literal and Enum: one of a few values, which a graph shows by name."""

from __future__ import annotations

import enum
import typing
from typing import Any

import torch

from torchop._errors import ArgumentValueError, short_repr
from torchop._schema import types
from torchop._schema.structure.kinds import Kind, wrong_type


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
        return None  # a graph could only show a number for each
    (cls,) = classes
    if issubclass(cls, enum.Enum):
        return None if issubclass(cls, enum.Flag) else _members(cls, choices)
    schema = types.argument_type(cls)
    if schema is None:
        return None
    accepted = (int, torch.SymInt) if cls is int else cls
    expected = _expected(choices)

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, accepted):
            raise wrong_type(where, expected, value)
        for choice in choices:
            if value == choice:
                return choice  # in place of a symbol
        raise ArgumentValueError(f"{where}: expected {expected}, got {short_repr(value)}.")

    return Kind(schema, check, decode=check, is_optional=None in values)


def _members(cls: type[enum.Enum], choices: tuple[Any, ...] | None = None) -> Kind:
    """The members of an Enum, or some of them, by name.

    Values may be any objects, and are renumbered more easily than members are renamed.
    """
    members = {n: m for n, m in cls.__members__.items() if choices is None or m in choices}
    expected = _expected(tuple(members if choices is None else (m.name for m in choices)))

    def encode(value: Any, where: str) -> str:
        if not isinstance(value, cls):
            raise wrong_type(where, types.spell(cls), value)
        if choices is not None and value not in choices:
            raise ArgumentValueError(f"{where}: expected {expected}, got {value.name!r}.")
        return value.name

    def decode(name: Any, where: str) -> Any:
        if name not in members:
            raise ArgumentValueError(f"{where}: expected {expected}, got {short_repr(name)}.")
        return members[name]

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
