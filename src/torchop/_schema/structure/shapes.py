"""The structures with named fields: dataclasses, NamedTuple, TypedDict, and classes of users."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchop._errors import ArgumentError, short_repr
from torchop._schema.structure.argument_types import ArgumentType
from torchop._schema.structure.kinds import wrong_type
from torchop._schema.structure.nodes import MISSING, Shape
from torchop._schema.structure.source import Source, is_plain


class _ClassShape(Shape):
    """Objects of exactly one class, with attributes."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.spelled = cls.__name__

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        # A subclass would come out as its base: the operator knows nothing of what it adds.
        source.require_class(value, self.cls, where, wrong_type)
        return functools.partial(source.attribute, value)

    def parts(self, value: Any, names: tuple[str, ...]) -> Mapping[str, Any] | None:
        if type(value) is self.cls:
            return {name: getattr(value, name) for name in names}
        return super().parts(value, names)


class DataclassShape(_ClassShape):
    """A dataclass, made again as `copy` and `pickle` do it where its own code has no part in it."""

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        cls = source.object(self.cls)
        if makes_itself(self.cls):
            initial = {field.name for field in dataclasses.fields(self.cls) if field.init}
            return f"{cls}({source.keywords({n: v for n, v in fields.items() if n in initial})})"
        # The __init__ of a frozen dataclass takes longer than all the rest of a call.
        local = source.variable(f"made_{self.spelled}")
        source.line(f"{local} = {source.object(object.__new__)}({cls})")
        if not _is_frozen(self.cls) and all(map(is_plain, fields)):
            for name, value in fields.items():
                source.line(f"{local}.{name} = {value}")
        elif _has_slots(self.cls) or not _is_frozen(self.cls):
            set_field = source.object(object.__setattr__)
            for name, value in fields.items():
                source.line(f"{set_field}({local}, {source.object(name)}, {value})")
        else:
            entries = source.variable("fields")
            source.line(f"{entries} = {local}.__dict__")
            for name, value in fields.items():
                source.line(f"{entries}[{source.object(name)}] = {value}")
        return local


def makes_itself(cls: Any) -> bool:
    """Whether code of the class takes part in making an object, so that it has to run."""
    code = getattr(cls.__init__, "__code__", None)
    return (
        hasattr(cls, "__post_init__")
        or "__dataclass_fields__" not in vars(cls)  # a class that only inherits from one
        or code is None
        or code.co_filename != "<string>"  # as the code is that `dataclass` writes,
        # and what `python -c` runs, under another name; code has a name since Python 3.11
        or not getattr(code, "co_qualname", "__create_fn__").startswith("__create_fn__")
        or cls.__new__ is not object.__new__
        or ("__setattr__" in vars(cls) and not _is_frozen(cls))
    )


def _is_frozen(cls: Any) -> bool:
    return bool(cls.__dataclass_params__.frozen)


def _has_slots(cls: type) -> bool:
    return any("__slots__" in vars(base) for base in cls.__mro__[:-1])


class NamedTupleShape(_ClassShape):
    """A NamedTuple."""

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        return f"{source.object(self.cls)}({', '.join(fields.values())})"


class TypedDictShape(Shape):
    """A dict with the keys of a TypedDict, of which some may be missing."""

    def __init__(self, cls: Any, keys: Iterable[str], required: Iterable[str]) -> None:
        self.spelled = cls.__name__
        self.required = frozenset(required)
        self.keys = frozenset(keys)

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        required, spelled = source.object(self.required, "required"), source.object(self.spelled)
        source.require_keys(value, self.keys, check_keys, required, spelled, repr(where))
        missing = source.object(MISSING, "missing")

        def entry(name: str) -> str:
            key = source.object(name)
            return f"{value}[{key}]" if name in self.required else f"{value}.get({key}, {missing})"

        return entry

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        local = source.variable("made_dict")
        required = {name: value for name, value in fields.items() if name in self.required}
        source.line(f"{local} = {source.items(required)}")
        missing = source.object(MISSING, "missing")
        for name, value in fields.items():
            if name not in self.required:
                with source.block(f"if {value} is not {missing}:"):
                    source.line(f"{local}[{source.object(name)}] = {value}")
        return local


def check_keys(
    value: Any, keys: frozenset[str], required: frozenset[str], spelled: str, where: str
) -> None:
    """Refuses what is no dict, and one with other keys than its TypedDict."""
    if not isinstance(value, dict):
        raise wrong_type(where, f"a dict, {spelled}", value)
    for name in sorted(required):
        if name not in value:
            raise ArgumentError(
                f"{where}: expected the key {short_repr(name)}, which {spelled} requires."
            )
    for name in value:
        if name not in keys:
            raise ArgumentError(
                f"{where}: got the key {short_repr(name)}, which {spelled} does not have; it has "
                f"{', '.join(sorted(keys))}."
            )


class RegisteredShape(_ClassShape):
    """A class for which a user told how to take it apart, and how to make it again."""

    def __init__(self, cls: type, registration: ArgumentType, names: Iterable[str]) -> None:
        super().__init__(cls)
        self.flatten = registration.flatten
        self.unflatten = registration.unflatten
        self.names = frozenset(names)

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        super().take_apart(source, value, where)
        flatten = source.object(self.flatten, f"flatten_{self.spelled}")
        parts = source.variable(f"{value}_parts")
        source.line(f"{parts} = {flatten}({value})")
        what = f"{where}: flatten of {self.spelled}"
        source.require_keys(parts, self.names, check_parts, repr(what))
        return lambda name: f"{parts}[{source.object(name)}]"

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        unflatten = source.object(self.unflatten, f"unflatten_{self.spelled}")
        return f"{unflatten}({source.keywords(fields)})"

    def parts(self, value: Any, names: tuple[str, ...]) -> Mapping[str, Any] | None:
        if type(value) is self.cls:
            parts = self.flatten(value)
            check_parts(parts, self.names, f"flatten of {self.spelled}")
            return typing.cast("Mapping[str, Any]", parts)
        return Shape.parts(self, value, names)


def check_parts(parts: Any, names: Iterable[str], where: str) -> None:
    """Refuses what a user's `flatten` returned, if `unflatten` would not get all of it."""
    names = sorted(names)
    if not isinstance(parts, Mapping):
        raise wrong_type(where, f"a dict with the keys {', '.join(names)}", parts)
    if len(parts) != len(names) or any(name not in parts for name in names):
        raise ArgumentError(
            f"{where}: expected the keys {', '.join(names)}, which unflatten takes, got "
            f"{', '.join(map(str, parts))}."
        )
