"""The supported structures: dataclasses, NamedTuples and, as results, tuples."""

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

MISSING: Any = inspect.Parameter.empty


class Field(NamedTuple):
    annotation: Any
    default: Any = MISSING


class Shape:
    """Describes a type with fields, and generates code to read them or to create instances."""

    def __init__(
        self, spelled: str, fields: Mapping[str, Field], qualified: str | None = None
    ) -> None:
        self.spelled = spelled
        self.qualified = qualified or spelled
        self.fields = fields

    def unpack(self, source: Source, value: str, path: str) -> Callable[[str], str]:
        """Emit code that checks the type of a value.

        `value` is a Python expression for the value, and `path` names the value in error messages.
        Return a function that maps a field's name to a Python expression for the field.
        """
        raise NotImplementedError

    def construct(self, source: Source, fields: Mapping[str, str]) -> str:
        """Emit code that creates an instance, and return a Python expression for the instance.

        `fields` maps the name of each field to a Python expression for its value.
        """
        raise NotImplementedError

    def parts(self, value: Any) -> Mapping[str, Any] | None:
        """Return an instance or a mapping as a mapping from field names, or else None."""
        if isinstance(value, Mapping):
            return value if set(value) <= set(self.fields) else None
        return None


class TupleShape(Shape):
    """A result that is a fixed-length tuple, with fields named `"0"`, `"1"` and so on."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__("tuple", {str(index): Field(item) for index, item in enumerate(items)})

    def unpack(self, source: Source, value: str, path: str) -> Callable[[str], str]:
        check = source.object(check_tuple)
        source.line(f"{check}({value}, {len(self.fields)}, {source.where(path)})")
        return lambda index: f"{value}[{index}]"

    def construct(self, source: Source, fields: Mapping[str, str]) -> str:
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
    """An argument or result that must be an instance of exactly this class."""

    def __init__(
        self, cls: type, fields: Mapping[str, Field], *, is_of_result: bool = False
    ) -> None:
        super().__init__(cls.__name__, fields, types.spell(cls))
        self.cls = cls
        self.is_of_result = is_of_result

    def unpack(self, source: Source, value: str, path: str) -> Callable[[str], str]:
        # Reject instances of subclasses: the operator would rebuild an instance of the base class,
        # so the extra fields of the subclass would be lost.
        wrong = wrong_result if self.is_of_result else wrong_type
        with source.block(f"if {source.object(type)}({value}) is not {source.object(self.cls)}:"):
            arguments = f"{source.where(path)}, {source.object(self.spelled)}, {value}"
            source.line(f"raise {source.object(wrong)}({arguments})")
        return functools.partial(source.attribute, value)

    def parts(self, value: Any) -> Mapping[str, Any] | None:
        if type(value) is self.cls:
            return {name: getattr(value, name) for name in self.fields}
        return super().parts(value)


class DataclassShape(ClassShape):
    def construct(self, source: Source, fields: Mapping[str, str]) -> str:
        cls = source.object(self.cls)
        # Dynamo traces the code that rebuilds results, and the only way to create an object that
        # Dynamo supports is calling the class.
        if self.is_of_result or has_custom_construction(self.cls):
            initial = {field.name for field in dataclasses.fields(self.cls) if field.init}
            return f"{cls}({source.keywords({n: v for n, v in fields.items() if n in initial})})"
        # Skip __init__, because for a frozen dataclass, it would take longer than the rest of the
        # call.
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


def has_custom_construction(cls: Any) -> bool:
    """Return whether creating an instance runs code written by the author of the class."""
    code = getattr(cls.__init__, "__code__", None)
    return (
        hasattr(cls, "__post_init__")
        or "__dataclass_fields__" not in vars(cls)  # a subclass that is not a dataclass itself
        or code is None
        # A generated __init__ has the file name "<string>", but so does code from `python -c`. So
        # compare the qualified name too, which code objects have since Python 3.11.
        or code.co_filename != "<string>"
        or not getattr(code, "co_qualname", "__create_fn__").startswith("__create_fn__")
        or cls.__new__ is not object.__new__
        or ("__setattr__" in vars(cls) and not _is_frozen(cls))
    )


def _is_frozen(cls: Any) -> bool:
    return bool(cls.__dataclass_params__.frozen)


class NamedTupleShape(ClassShape):
    def construct(self, source: Source, fields: Mapping[str, str]) -> str:
        return f"{source.object(self.cls)}({', '.join(fields.values())})"


def as_mapping(value: Any) -> Any:
    """Return the fields of a dataclass or NamedTuple as a dict, and other values unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value._asdict() if hasattr(value, "_asdict") else value


def argument_shape(annotation: Any) -> Shape | None:
    if not isinstance(annotation, type):
        return None
    return _class_shape(annotation, is_of_result=False)


def result_shape(annotation: Any) -> Shape | None:
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
                    f"{types.spell(annotation)} cannot be a result: __init__ does not take the "
                    f"field {field.name!r}, so the object cannot be rebuilt. Add it to __init__, "
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
        return None  # a collections.namedtuple, which has no annotations
    fields = {name: Field(hints[name], defaults.get(name, MISSING)) for name in named._fields}
    return NamedTupleShape(cls, fields, is_of_result=is_of_result)


def _fields_of_dataclass(cls: Any) -> dict[str, Field]:
    """Return a dataclass's fields.

    Raise SchemaError if an instance of the class cannot be rebuilt from its fields alone.
    """
    hints = hints_of(cls)
    unknown = [name for name, hint in hints.items() if isinstance(hint, dataclasses.InitVar)]
    if unknown:
        raise SchemaError(
            f"{types.spell(cls)} cannot be an argument: the object does not store the InitVar "
            f"{unknown[0]!r}, so it cannot be rebuilt. Use a field."
        )
    fields = {}
    for field in dataclasses.fields(cls):
        if not field.init and has_custom_construction(cls):
            continue  # __init__ or __post_init__ computes the field
        default: Any = MISSING
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            default = field.default
        fields[field.name] = Field(hints[field.name], default)
    if has_custom_construction(cls) and not accepts(cls, (), fields):
        raise SchemaError(
            f"{types.spell(cls)} cannot be an argument: __init__ does not take the fields "
            f"({', '.join(fields)}) by name, so the object cannot be rebuilt. Add them to "
            "__init__."
        )
    return fields


def hints_of(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, localns={"Tensor": torch.Tensor})
    except Exception as error:
        raise SchemaError(
            f"{types.spell(cls)} has an annotation that is not a type ({error}); import the name "
            "at module level, where annotations are looked up."
        ) from None
