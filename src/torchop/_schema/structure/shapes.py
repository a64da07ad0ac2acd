"""Structures with fields: dataclasses, NamedTuples, and tuples as results."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torchop._errors import ResultError, SchemaError
from torchop._schema import types
from torchop._schema.callables import accepts
from torchop._schema.kinds import wrong_type
from torchop._schema.structure.source import Source, is_plain

# Stands for a default, or a key, that is not there.
MISSING: Any = inspect.Parameter.empty


class Field(NamedTuple):
    """A field of a structure, as it is declared."""

    annotation: Any
    default: Any = MISSING


class Shape:
    """How the fields of a kind of structure are read, and how one is made of them.

    Attributes:
        spelled: how messages name the structure.
        qualified: the same, with the module.
        fields: the declared fields, by name.
    """

    def __init__(
        self, spelled: str, fields: Mapping[str, Field], qualified: str | None = None
    ) -> None:
        self.spelled = spelled
        self.qualified = qualified or spelled
        self.fields = fields

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        """Writes the check of the structure; returns a function from a field to its expression."""
        raise NotImplementedError  # every shape defines its own

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        """Writes what makes a structure from the expressions of its fields."""
        raise NotImplementedError  # every shape defines its own

    def parts(self, value: Any) -> Mapping[str, Any] | None:
        """The fields of an object or a mapping that need not be complete; None for all else."""
        if isinstance(value, Mapping):
            return value if set(value) <= set(self.fields) else None
        return None


class TupleShape(Shape):
    """A tuple of a fixed length as a result, whose fields are called by their numbers."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__("tuple", {str(index): Field(item) for index, item in enumerate(items)})

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        check = source.object(check_tuple)
        source.line(f"{check}({value}, {len(self.fields)}, {where!r})")
        return lambda index: f"{value}[{index}]"

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        return f"({', '.join(fields.values())},)"


def check_tuple(value: Any, length: int, where: str) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != length:
        raise wrong_result(where, f"a tuple of {length}", value)


def wrong_result(where: str, expected: str, value: Any) -> ResultError:
    returned = f"a {types.spell(type(value))}"
    if isinstance(value, (tuple, list)):
        returned += f" of {len(value)}"
    return ResultError(f"{where}: expected {expected}, but the function returned {returned}.")


class ClassShape(Shape):
    """Objects of exactly one class, with attributes, as an argument or a result."""

    def __init__(
        self, cls: type, fields: Mapping[str, Field], *, is_of_result: bool = False
    ) -> None:
        super().__init__(cls.__name__, fields, types.spell(cls))
        self.cls = cls
        self.is_of_result = is_of_result

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        # A subclass would come out as its base: the operator knows nothing of what it adds.
        wrong = wrong_result if self.is_of_result else wrong_type
        with source.block(f"if {source.object(type)}({value}) is not {source.object(self.cls)}:"):
            error = f"{source.object(wrong)}({where!r}, {source.object(self.spelled)}, {value})"
            source.line(f"raise {error}")
        return functools.partial(source.attribute, value)

    def parts(self, value: Any) -> Mapping[str, Any] | None:
        if type(value) is self.cls:
            return {name: getattr(value, name) for name in self.fields}
        return super().parts(value)


class DataclassShape(ClassShape):
    """A dataclass, made again as `copy` and `pickle` do it where its own code has no part in it."""

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        cls = source.object(self.cls)
        # Dynamo follows how a result is made, and knows no other way.
        if self.is_of_result or makes_itself(self.cls):
            initial = {field.name for field in dataclasses.fields(self.cls) if field.init}
            return f"{cls}({source.keywords({n: v for n, v in fields.items() if n in initial})})"
        # The __init__ of a frozen dataclass takes longer than all the rest of a call.
        local = source.variable(f"made_{self.spelled}")
        source.line(f"{local} = {source.object(object.__new__)}({cls})")
        if not _is_frozen(self.cls) and all(map(is_plain, fields)):
            for name, value in fields.items():
                source.line(f"{local}.{name} = {value}")
        elif any("__slots__" in vars(base) for base in self.cls.__mro__[:-1]):
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


class NamedTupleShape(ClassShape):
    """A NamedTuple."""

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        return f"{source.object(self.cls)}({', '.join(fields.values())})"


def argument_shape(annotation: Any) -> Shape | None:
    """The shape of a structure that is an argument; None if the annotation is none."""
    if not isinstance(annotation, type):
        return None
    return _class_shape(annotation, is_of_result=False)


def result_shape(annotation: Any) -> Shape | None:
    """The shape of a structure that is a result; None if the annotation is none."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and args and Ellipsis not in args:
        return TupleShape(args)
    if not isinstance(annotation, type):
        return None
    shape = _class_shape(annotation, is_of_result=True)
    if isinstance(shape, DataclassShape):
        for field in dataclasses.fields(shape.cls):
            if field.name in shape.fields and not field.init:
                raise SchemaError(
                    f"{types.spell(annotation)} cannot be a result: its __init__ does not take the "
                    f"field {field.name!r}, so the object cannot be rebuilt. Let __init__ take it, "
                    "or compute the field in __post_init__."
                )
    return shape


def _class_shape(cls: type, *, is_of_result: bool) -> ClassShape | None:
    if dataclasses.is_dataclass(cls):
        return DataclassShape(cls, _fields_of_dataclass(cls), is_of_result=is_of_result)
    named: Any = cls
    if not issubclass(cls, tuple) or not hasattr(cls, "_fields"):
        return None
    hints, defaults = hints_of(cls), named._field_defaults
    if not set(named._fields) <= set(hints):
        return None  # a `collections.namedtuple` does not say of which types it is
    fields = {name: Field(hints[name], defaults.get(name, MISSING)) for name in named._fields}
    return NamedTupleShape(cls, fields, is_of_result=is_of_result)


def _fields_of_dataclass(cls: Any) -> dict[str, Field]:
    """The fields from which an object can be rebuilt; refuses other classes."""
    hints = hints_of(cls)
    unknown = [name for name, hint in hints.items() if isinstance(hint, dataclasses.InitVar)]
    if unknown:
        raise SchemaError(
            f"{types.spell(cls)} cannot be taken apart: its InitVar {unknown[0]!r} is not kept in "
            "the object, so the object cannot be rebuilt. Use a field."
        )
    fields = {}
    for field in dataclasses.fields(cls):
        if not field.init and makes_itself(cls):
            continue  # the code of the class computes it again
        default: Any = MISSING
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            default = field.default
        fields[field.name] = Field(hints[field.name], default)
    if makes_itself(cls) and not accepts(cls, (), fields):
        raise SchemaError(
            f"{types.spell(cls)} cannot be taken apart: its __init__ does not take its fields "
            f"({', '.join(fields)}) by name, so the object cannot be rebuilt. Let __init__ take "
            "them."
        )
    return fields


def hints_of(cls: Any) -> dict[str, Any]:
    """The annotations of a class, evaluated."""
    try:
        return typing.get_type_hints(cls, localns={"Tensor": torch.Tensor})
    except Exception as error:
        raise SchemaError(
            f"{types.spell(cls)} has an annotation that is not a type ({error}); import what it "
            "names at module level, where annotations are looked up."
        ) from None
