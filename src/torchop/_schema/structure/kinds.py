"""The kinds of values that become one argument of the flat operator, or two: checked, converted.

A value of a structure is *encoded* into a value of the schema's type, and *decoded* for the kernel.
"""

from __future__ import annotations

import enum
import operator
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch

from torchop._compat import schemas
from torchop._compat.classes import FakeScriptObject
from torchop._errors import ArgumentError, ArgumentValueError, short_repr
from torchop._schema import types

Encode = Callable[[Any, str], Any]


class Kind(NamedTuple):
    """How values of one annotation travel.

    Attributes:
        schema: the schema type, without a `?`.
        encode: `encode(value, where)` gives a value of the schema's type, or raises.
        exact: values of exactly this type need no encoding.
        decode: `decode(value, where)` gives the value that was encoded, or raises for what no
            value is encoded as; None if there is nothing to decode.
        is_optional: whether None is a value too.
    """

    schema: str
    encode: Encode
    exact: type | None = None
    decode: Encode | None = None
    is_optional: bool = False


def wrong_type(where: str, expected: str, value: Any) -> ArgumentError:
    """The error for a value that is not of the type that the annotation says."""
    # Dynamo cannot follow how types are spelled, and would report that instead.
    got = type(value).__name__ if torch.compiler.is_dynamo_compiling() else types.spell(type(value))
    return ArgumentError(f"{where}: expected {expected}, got {got}.")


def unchanged(value: Any, where: str) -> Any:
    return value


def _integer(value: Any, where: str) -> Any:
    if isinstance(value, (int, torch.SymInt)):
        return value
    if hasattr(value, "__index__") and not isinstance(value, torch.Tensor):
        return operator.index(value)  # one of NumPy's
    raise wrong_type(where, "int", value)


def _float(value: Any, where: str) -> Any:
    if isinstance(value, (float, torch.SymFloat)):
        return value
    # Asked for last: Dynamo does not know the attributes of a number that it does not.
    if isinstance(value, (int, torch.SymInt)) or (
        not isinstance(value, torch.Tensor) and hasattr(value, "__float__")
    ):
        return float(value)
    raise wrong_type(where, "float", value)


_REAL_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _complex(value: Any, where: str) -> Any:
    if isinstance(value, (complex, *_REAL_NUMBERS)):
        # Dynamo cannot convert a number that it does not know. Kernels get it decoded, as complex.
        return value if torch.compiler.is_dynamo_compiling() else complex(value)
    raise wrong_type(where, "complex", value)


def _instance(*classes: type, expected: str | None = None) -> Encode:
    def encode(value: Any, where: str) -> Any:
        if isinstance(value, classes):
            return value
        raise wrong_type(where, expected or types.spell(classes[0]), value)

    return encode


_TENSOR = Kind("Tensor", _instance(torch.Tensor), torch.Tensor)
_NUMBERS = (*_REAL_NUMBERS, torch.SymBool)
_NUMBER = Kind("Scalar", _instance(*_NUMBERS, expected="a number"), float)
KINDS: dict[Any, Kind] = {
    torch.Tensor: _TENSOR,
    # Kernels get it as a plain tensor from autograd, functionalization and graphs.
    torch.nn.Parameter: _TENSOR._replace(exact=torch.nn.Parameter),
    int: Kind("SymInt", _integer, int),
    float: Kind("float", _float, float),
    bool: Kind("bool", _instance(bool, torch.SymBool), bool),
    str: Kind("str", _instance(str), str),
    complex: Kind("Scalar", _complex, complex, lambda value, where: complex(value)),
    torch.dtype: Kind("ScalarType", _instance(torch.dtype), torch.dtype),
    torch.device: Kind("Device", _instance(torch.device, str), torch.device),
    torch.layout: Kind("Layout", _instance(torch.layout), torch.layout),
    torch.memory_format: Kind("MemoryFormat", _instance(torch.memory_format), torch.memory_format),
}
_REAL = frozenset({int, float, bool})


def single_kind(annotation: Any) -> Kind | None:
    """The kind of a single value of this annotation; None if it is no such value."""
    if types.is_union(annotation):
        members = frozenset(typing.get_args(annotation))
        if members <= _REAL:
            return _NUMBER
        if complex in members and members <= _REAL | {complex}:
            return Kind("Scalar", _instance(complex, int, float), complex)
        return None
    if schemas.is_group_name(annotation):
        return KINDS[str]
    kind = types.find(KINDS, annotation)
    if kind is not None:
        return kind
    if hasattr(annotation, "__supertype__"):  # a NewType
        return single_kind(annotation.__supertype__)
    name = schemas.custom_class_name(annotation)
    if name is None:
        return None
    # An object that PyTorch passes on as it is, without a look at its class. Of such an object,
    # Dynamo 2.12 cannot tell whether its class is exactly this one.
    check = _instance(annotation, FakeScriptObject)
    return Kind(name, check, decode=check)


# --------------------------------------------------------------------------------------------------
# Literal and Enum: one of a few values, which a graph shows by name


def choice_kind(annotation: Any) -> Kind | None:
    """The kind of a Literal or an Enum class; None if the annotation is neither."""
    if typing.get_origin(annotation) is typing.Literal:
        return _literal(typing.get_args(annotation))
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    return _members(annotation) if is_enum and not issubclass(annotation, enum.Flag) else None


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


def _expected(choices: tuple[Any, ...]) -> str:
    return f"one of {', '.join(map(repr, choices))}"


# --------------------------------------------------------------------------------------------------
# Lists, tuples and `torch.Size`: several values of one kind, in one argument


# The types of which a schema has lists, and exported files can hold them.
_LISTED = frozenset({"Tensor", "SymInt", "float", "bool", "str"})


class Container(NamedTuple):
    """What holds the items: a `list` or a `tuple`; with a `length` if their number is fixed."""

    item: Any
    is_tuple: bool = False
    length: int | None = None


def read_container(annotation: Any) -> Container | None:
    """Reads `list[X]`, `Sequence[X]`, `tuple[X, ...]` and `tuple[X, X]`; None for all else."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in types.SEQUENCES and args:
        return Container(args[0])
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return Container(args[0], is_tuple=True)
    if origin is tuple and args and all(item == args[0] for item in args):
        return Container(args[0], is_tuple=True, length=len(args))
    return None


def sequence_kind(annotation: Any) -> Kind | None:
    """The kind of several values of one kind; None if the annotation is no such container."""
    if annotation is torch.Size:
        # Its numbers may be symbols.
        return list_of(KINDS[int])._replace(decode=lambda sizes, where: torch.Size(sizes))
    container = read_container(annotation)
    if container is None:
        return None
    item = _DTYPE_NAME if container.item is torch.dtype else single_kind(container.item)
    if item is None or item.schema not in _LISTED:
        return None
    return list_of(item, container.length)._replace(decode=_decode(item, container))


def list_of(item: Kind, length: int | None = None) -> Kind:
    """The kind of a list of values of one kind, as many as `length` says."""
    exact, encode_item = item.exact, item.encode

    def encode(values: Any, where: str) -> list[Any]:
        if not isinstance(values, (list, tuple)):
            raise wrong_type(where, "a list or tuple", values)
        check_length(values, length, where)
        items = []
        for index, value in enumerate(values):
            if type(value) is not exact:
                value = encode_item(value, f"{where}[{index}]")
            items.append(value)
        return items

    return Kind(f"{item.schema}[]", encode)


def _decode(item: Kind, container: Container) -> Encode | None:
    decode_item, is_tuple, length = item.decode, container.is_tuple, container.length
    if decode_item is None and not is_tuple:
        return None

    def decode(values: Any, where: str) -> list[Any] | tuple[Any, ...]:
        check_length(values, length, where)
        if decode_item is not None:
            values = [decode_item(value, where) for value in values]
        return tuple(values) if is_tuple else values

    return decode


def check_length(values: Any, length: int | None, where: str) -> None:
    """Refuses a container with another number of items, if their number is fixed."""
    if length is not None and len(values) != length:
        raise ArgumentValueError(f"{where}: expected {length} items, got {len(values)}.")


def _encode_dtype(value: Any, where: str) -> str:
    return str(KINDS[torch.dtype].encode(value, where)).removeprefix("torch.")


def _decode_dtype(name: Any, where: str) -> torch.dtype:
    if name not in schemas.dtypes():
        raise ArgumentValueError(
            f"{where}: expected names of dtypes, such as 'float32', got {short_repr(name)}."
        )
    return schemas.dtypes()[name]


# By name: an exported file has no lists of dtypes.
_DTYPE_NAME = Kind("str", _encode_dtype, decode=_decode_dtype)


# --------------------------------------------------------------------------------------------------
# Values that take two arguments: a dict, and a list of lists


def mapping(item: Kind) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A dict with strings as keys: its keys, and its values."""
    exact, encode_item = item.exact, item.encode

    def encode(value: Any, where: str) -> tuple[list[str], list[Any]]:
        if not isinstance(value, dict):
            raise wrong_type(where, "a dict", value)
        keys, values = [], []
        for key, entry in value.items():
            if not isinstance(key, str):
                raise wrong_type(f"{where}: the key {short_repr(key)}", "str", key)
            if type(entry) is not exact:
                entry = encode_item(entry, f"{where}[{short_repr(key)}]")
            keys.append(key)
            values.append(entry)
        return keys, values

    def decode(keys: Any, values: Any, where: str) -> dict[str, Any]:
        if len(keys) != len(values):
            raise ArgumentValueError(f"{where}: got {len(keys)} keys for {len(values)} values.")
        return dict(zip(keys, values, strict=True))

    return encode, decode


def nested(
    outer: Container, inner: Container, item: Kind
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A list of lists: the items of all, and how many each has."""
    encode_rows = list_of(list_of(item, inner.length), outer.length).encode
    row_type: type = tuple if inner.is_tuple else list
    result_type: type = tuple if outer.is_tuple else list

    def encode(value: Any, where: str) -> tuple[list[Any], list[int]]:
        rows = encode_rows(value, where)
        return [item for row in rows for item in row], [len(row) for row in rows]

    def decode(values: Any, lengths: Any, where: str) -> Any:
        if sum(lengths) != len(values) or any(length < 0 for length in lengths):
            raise ArgumentValueError(
                f"{where}: the lengths {list(lengths)} do not add up to {len(values)} values."
            )
        rows: list[Any] = []
        start = 0
        for length in lengths:
            row = values[start : start + length]
            check_length(row, inner.length, f"{where}[{len(rows)}]")
            rows.append(row_type(row))
            start += length
        check_length(rows, outer.length, where)
        return result_type(rows)

    return encode, decode


# --------------------------------------------------------------------------------------------------
# Of any annotation


def leaf_kind(annotation: Any) -> Kind | None:
    """The kind of an annotation that one flat argument can stand for."""
    annotation = without_annotated(annotation)
    inner, optional = types.strip_optional(annotation)
    inner = without_annotated(inner)
    kind = choice_kind(inner) or single_kind(inner) or sequence_kind(inner)
    if kind is None or not optional:
        return kind
    if kind.schema == "Tensor[]":
        return None  # the dispatcher does not look into an optional list of tensors
    return kind._replace(is_optional=True)


def without_annotated(annotation: Any) -> Any:
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation
