"""Structures with fields: dataclasses, NamedTuple, TypedDict, tuples, and classes of users."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from torchop._errors import ArgumentError, ResultError, SchemaError, short_repr
from torchop._schema import signatures, types
from torchop._schema.callables import accepts, check_callable
from torchop._schema.structure.kinds import wrapper, wrong_type
from torchop._schema.structure.source import Source, is_plain

T = TypeVar("T")

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
        fields: as they are declared, by name.
    """

    def __init__(self, spelled: str, fields: Mapping[str, Field]) -> None:
        self.spelled = spelled
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
        super().__init__(cls.__name__, fields)
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


class TypedDictShape(Shape):
    """A dict with the keys of a TypedDict, of which some may be missing."""

    def __init__(self, cls: Any) -> None:
        super().__init__(cls.__name__, {n: Field(hint) for n, hint in hints_of(cls).items()})
        self.required = frozenset(_required_keys(cls))

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        required, spelled = source.object(self.required, "required"), source.object(self.spelled)
        source.require_keys(
            value, frozenset(self.fields), check_keys, required, spelled, repr(where)
        )
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


class ArgumentType(NamedTuple):
    """What a user registered for a class; the parameters of `unflatten` are its fields."""

    flatten: Callable[[Any], Any]
    unflatten: Callable[..., Any]
    signature: inspect.Signature


_registered: dict[type, ArgumentType] = {}


class RegisteredShape(ClassShape):
    """A class for which a user told how to take it apart, and how to make it again."""

    def __init__(self, cls: type, registration: ArgumentType) -> None:
        parameters = registration.signature.parameters.values()
        super().__init__(cls, {p.name: Field(p.annotation, p.default) for p in parameters})
        self.flatten = registration.flatten
        self.unflatten = registration.unflatten

    def take_apart(self, source: Source, value: str, where: str) -> Callable[[str], str]:
        super().take_apart(source, value, where)
        flatten = source.object(self.flatten, f"flatten_{self.spelled}")
        parts = source.variable(f"{value}_parts")
        source.line(f"{parts} = {flatten}({value})")
        what = f"{where}: flatten of {self.spelled}"
        source.require_keys(parts, frozenset(self.fields), check_parts, repr(what))
        return lambda name: f"{parts}[{source.object(name)}]"

    def make(self, source: Source, fields: Mapping[str, str]) -> str:
        unflatten = source.object(self.unflatten, f"unflatten_{self.spelled}")
        return f"{unflatten}({source.keywords(fields)})"

    def parts(self, value: Any) -> Mapping[str, Any] | None:
        if type(value) is self.cls:
            parts = self.flatten(value)
            check_parts(parts, self.fields, f"flatten of {self.spelled}")
            return typing.cast("Mapping[str, Any]", parts)
        return Shape.parts(self, value)


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


def argument_shape(annotation: Any) -> Shape | None:
    """The shape of a structure that is an argument; None if the annotation is none."""
    if not isinstance(annotation, type):
        return None
    if annotation in _registered:  # itself, and no other class
        return RegisteredShape(annotation, _registered[annotation])
    if issubclass(annotation, dict) and hasattr(annotation, "__required_keys__"):
        return TypedDictShape(annotation)
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
            "them, or register the class with torchop.register_argument_type."
        )
    return fields


def _required_keys(cls: Any) -> set[str]:
    """The keys that a TypedDict requires, also where its annotations are strings.

    `__required_keys__` does not look into those (https://peps.python.org/pep-0655).
    """
    required = set(cls.__required_keys__)
    for name, hint in hints_of(cls, extras=True).items():
        kept = wrapper(hint)
        if kept == "Required":
            required.add(name)
        elif kept == "NotRequired":
            required.discard(name)
    return required


def hints_of(cls: Any, *, extras: bool = False) -> dict[str, Any]:
    """The annotations of a class, evaluated; with `extras`, in wrappers such as `Annotated`."""
    try:
        return typing.get_type_hints(cls, localns={"Tensor": torch.Tensor}, include_extras=extras)
    except Exception as error:
        raise SchemaError(
            f"{types.spell(cls)} has an annotation that is not a type ({error}); import what it "
            "names at module level, where annotations are looked up."
        ) from None


def register_argument_type(
    cls: type[T], *, flatten: Callable[[T], dict[str, Any]], unflatten: Callable[..., T]
) -> None:
    """Lets operators take objects of a class of yours.

    The flat operator takes one argument for each parameter of `unflatten`, so an exported program
    holds plain values, and only needs your class when the kernel runs.

    Args:
        cls: the class; subclasses are other classes.
        flatten: `flatten(object)` returns the parts, a dict by the names of the parameters of
            `unflatten`. Compilers trace it.
        unflatten: `unflatten(**parts)` makes an equal object. The annotations of its parameters are
            those that a parameter of `custom_op` may have.

    Raises:
        SchemaError: a `ValueError`: a parameter of `unflatten` has no name or no annotation, or
            `cls` is a type that operators take already.
        TypeError: `cls` is not a class, or one of the others is not a function.

    Example:
        >>> import fractions, torch, torchop
        >>> def halves(numerator: int, denominator: int = 1) -> fractions.Fraction:
        ...     return fractions.Fraction(numerator, denominator)
        >>> torchop.register_argument_type(
        ...     fractions.Fraction,
        ...     flatten=lambda f: {"numerator": f.numerator, "denominator": f.denominator},
        ...     unflatten=halves,
        ... )
        >>> @torchop.custom_op("docs::times", mutates_args=())
        ... def times(x: torch.Tensor, by: fractions.Fraction) -> torch.Tensor:
        ...     return x * by.numerator / by.denominator
        >>> times(torch.ones(2), fractions.Fraction(3, 2))
        tensor([1.5000, 1.5000])
        >>> print(times.schema)
        docs::times(Tensor x, *, SymInt by_numerator, SymInt by_denominator=1) -> Tensor

    The idea is `torch.utils._pytree.register_pytree_node`, with parts that have names and types.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_argument_type expects a class, got {short_repr(cls)}.")
    where = f"register_argument_type({cls.__name__})"
    check_callable(f"{where}: flatten", flatten)
    check_callable(f"{where}: unflatten", unflatten)
    if types.argument_type(cls) is not None or issubclass(cls, torch.Tensor):
        raise SchemaError(f"register_argument_type: operators accept {types.spell(cls)} already.")
    signature = signatures.signature(unflatten)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SchemaError(
                f"{where}: unflatten is called with a keyword for each part, which "
                f"{short_repr(str(parameter))} cannot take. Name the parts."
            )
        if parameter.annotation is parameter.empty:
            raise SchemaError(
                f"{where}: the parameter {parameter.name!r} of unflatten must have a type "
                "annotation, which gives the schema its type."
            )
    _registered[cls] = ArgumentType(flatten, unflatten, signature)
