"""The schema type of each supported annotation, and the conversion of values to that type.

A call *encodes* each Python value as a value of the schema type, and *decodes* it again for the
kernel. Most values need neither step, because `torch.library.infer_schema` supports their
annotations and the dispatcher checks them.
"""

from __future__ import annotations

import enum
import inspect
import operator
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch

from torchop._compat import opaque_types, schemas
from torchop._compat.classes import FakeScriptObject
from torchop._errors import ArgumentError, mistake, short_repr
from torchop._schema import types
from torchop._schema.text import write_results

Encode = Callable[[Any, str], Any]


class Kind(NamedTuple):
    """The schema type for an annotation, with the functions that convert annotated values.

    `encode` and `decode` take a value and a prefix for error messages, such as the argument's name.
    They return the converted value, or raise an error that starts with this prefix.

    Attributes:
        schema: the schema type, without a `?`.
        exact: values of exactly this class are not encoded. If None, every value is encoded.
        decode: None if no conversion is needed.
        inferred: the schema type that `infer_schema` infers, or None if it rejects the annotation.
    """

    schema: str
    encode: Encode
    exact: type | None = None
    decode: Encode | None = None
    is_optional: bool = False
    inferred: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the dispatcher accepts the values without conversion."""
        return self.inferred is not None and self.decode is None


def wrong_type(where: str, expected: str, value: Any) -> ArgumentError:
    # Dynamo cannot trace `types.spell`. If we called `types.spell` while compiling, the user would
    # see Dynamo's error about it instead of this one.
    got = type(value).__name__ if torch.compiler.is_dynamo_compiling() else types.spell(type(value))
    return ArgumentError(f"{where}: expected {expected}, got {got}.")


def unchanged(value: Any, where: str) -> Any:
    return value


def _integer(value: Any, where: str) -> Any:
    if isinstance(value, (int, torch.SymInt)):
        return value
    if hasattr(value, "__index__") and not isinstance(value, torch.Tensor):
        return operator.index(value)  # such as a NumPy integer
    raise wrong_type(where, "int", value)


def _float(value: Any, where: str) -> Any:
    if isinstance(value, (float, torch.SymFloat)):
        return value
    # Check hasattr last, because Dynamo cannot trace it for symbolic numbers.
    if isinstance(value, (int, torch.SymInt)) or (
        not isinstance(value, torch.Tensor) and hasattr(value, "__float__")
    ):
        return float(value)
    raise wrong_type(where, "float", value)


_REAL_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _complex(value: Any, where: str) -> Any:
    if isinstance(value, (complex, *_REAL_NUMBERS)):
        # Dynamo cannot trace complex() for a symbolic number, so let `decode` convert it later.
        return value if torch.compiler.is_dynamo_compiling() else complex(value)
    raise wrong_type(where, "complex", value)


def _instance(*classes: type, expected: str | None = None) -> Encode:
    def encode(value: Any, where: str) -> Any:
        if isinstance(value, classes):
            return value
        raise wrong_type(where, expected or types.spell(classes[0]), value)

    return encode


def _inferred(schema: str, encode: Encode, exact: type) -> Kind:
    return Kind(schema, encode, exact, inferred=schema)


_NUMBERS = (*_REAL_NUMBERS, torch.SymBool)
_NUMBER = Kind("Scalar", _instance(*_NUMBERS, expected="a number"), float)
KINDS: dict[Any, Kind] = {
    torch.Tensor: _inferred("Tensor", _instance(torch.Tensor), torch.Tensor),
    # `infer_schema` rejects the annotation Parameter, because a kernel never receives one:
    # autograd, functionalization and graph capture all replace it with a plain Tensor.
    torch.nn.Parameter: Kind("Tensor", _instance(torch.Tensor), torch.nn.Parameter),
    int: _inferred("SymInt", _integer, int),
    float: _inferred("float", _float, float),
    bool: _inferred("bool", _instance(bool, torch.SymBool), bool),
    str: _inferred("str", _instance(str), str),
    complex: Kind("Scalar", _complex, complex, lambda value, where: complex(value)),
    torch.dtype: _inferred("ScalarType", _instance(torch.dtype), torch.dtype),
    torch.device: _inferred("Device", _instance(torch.device, str), torch.device),
    torch.layout: Kind("Layout", _instance(torch.layout), torch.layout),
    torch.memory_format: Kind("MemoryFormat", _instance(torch.memory_format), torch.memory_format),
}
_REAL = frozenset({int, float, bool})


def single_kind(annotation: Any) -> Kind | None:
    kind = types.find(KINDS, annotation)
    if kind is not None:
        return kind
    if types.is_union(annotation):
        members = frozenset(typing.get_args(annotation))
        if members <= _REAL:
            return _NUMBER._replace(inferred="Scalar" if members == _REAL else None)
        if complex in members and members <= _REAL | {complex}:
            return Kind("Scalar", _instance(complex, int, float), complex)
        return None
    if schemas.is_group_name(annotation):
        return KINDS[str]
    if hasattr(annotation, "__supertype__"):  # a NewType
        kind = single_kind(annotation.__supertype__)
        return None if kind is None else kind._replace(inferred=None)
    name = opaque_types.custom_class_name(annotation)
    if name is None:
        return None
    if name == "Generator":  # a built-in type of schemas, not a script class
        return _inferred(name, _instance(annotation), annotation)
    if "<locals>" in name:
        raise mistake(
            f"the class {annotation.__name__} is defined inside a function, so schemas cannot "
            f"contain its name, {name}. Register it with torchop.opaque instead of "
            "register_opaque_type, or define it at the top level of a module."
        )
    # Check the class here, because the dispatcher does not. Leave `exact` unset, because Dynamo in
    # PyTorch 2.12 cannot compare the types of script objects. Accept a FakeScriptObject as well,
    # since it stands in for the object during tracing.
    check = _instance(annotation, FakeScriptObject)
    return Kind(name, check, decode=check, inferred=name)


def is_object(kind: Kind) -> bool:
    """Return whether values of this kind are instances of an opaque class, or lists of them."""
    return "." in kind.schema


def is_by_reference(schema_type: str) -> bool:
    """Return whether a schema type is an opaque class passed by reference, or a list of it."""
    return opaque_types.names_reference(schema_type.rstrip("?[]"))


# --------------------------------------------------------------------------------------------------
# Literal and Enum, which are encoded so that graphs stay readable


def choice_kind(annotation: Any) -> Kind | None:
    if typing.get_origin(annotation) is typing.Literal:
        return _literal(typing.get_args(annotation))
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    if not is_enum or issubclass(annotation, enum.Flag):
        return None
    # PyTorch would pass an Enum as a script object, but script objects don't round-trip through
    # torch.export.save and load. So encode the Enum as a str.
    return _members(annotation)._replace(inferred=opaque_types.custom_class_name(annotation))


def _literal(values: tuple[Any, ...]) -> Kind | None:
    choices = tuple(value for value in values if value is not None)
    classes = {type(value) for value in choices}
    if len(classes) != 1:
        return None  # values of different types have no common schema type
    (cls,) = classes
    if issubclass(cls, enum.Enum):
        return None if issubclass(cls, enum.Flag) else _members(cls, choices)
    schema = argument_type(cls)
    if schema is None:
        return None
    accepted = (int, torch.SymInt) if cls is int else cls
    expected = _expected(choices)

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, accepted):
            raise wrong_type(where, expected, value)
        for choice in choices:
            if value == choice:
                return choice  # a constant, even if `value` is a SymInt
        raise ArgumentError(f"{where}: expected {expected}, got {short_repr(value)}.")

    return Kind(schema, check, decode=check, is_optional=None in values)


def _members(cls: type[enum.Enum], choices: tuple[Any, ...] | None = None) -> Kind:
    """Return the `Kind` of an Enum. If `choices` is given, accept only these members.

    Encode each member as its name rather than its value, because a value can be any object, and
    because authors change values more often than names.
    """
    members = {n: m for n, m in cls.__members__.items() if choices is None or m in choices}
    expected = _expected(tuple(members if choices is None else (m.name for m in choices)))

    def encode(value: Any, where: str) -> str:
        if not isinstance(value, cls):
            raise wrong_type(where, types.spell(cls), value)
        if choices is not None and value not in choices:
            raise ArgumentError(f"{where}: expected {expected}, got {value.name!r}.")
        return value.name

    def decode(name: Any, where: str) -> Any:
        if name not in members:
            raise ArgumentError(f"{where}: expected {expected}, got {short_repr(name)}.")
        return members[name]

    return Kind("str", encode, decode=decode)


def _expected(choices: tuple[Any, ...]) -> str:
    return f"one of {', '.join(map(repr, choices))}"


# --------------------------------------------------------------------------------------------------
# Lists, tuples and `torch.Size`


# torch.export can serialize lists of these schema types. So a list whose items are encoded as one
# of these types can be converted item by item.
CONVERTED_ITEMS = frozenset({"Tensor", "SymInt", "float", "bool", "str"})
_INFERRED_LISTS = frozenset({"Tensor[]", "Tensor?[]", "Scalar[]", "SymInt[]", "float[]", "bool[]"})
_INFERRED_OPTIONALS = frozenset(
    {"Tensor", "SymInt", "float", "bool", "str", "Scalar", "ScalarType", "Device"}
    | (_INFERRED_LISTS - {"Scalar[]"})
)
# Never convert an optional list of these types, because the dispatcher ignores the tensors in
# optional lists. Pass such a list unchanged if `infer_schema` supports it, and reject it otherwise.
_UNCONVERTED_OPTIONALS = frozenset({"Tensor[]", "Tensor?[]", "Scalar[]"})


class Container(NamedTuple):
    item: Any
    is_tuple: bool = False
    length: int | None = None


def read_container(annotation: Any) -> Container | None:
    """Parse `list[X]`, `Sequence[X]`, `tuple[X, ...]` or `tuple[X, X]`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in types.SEQUENCES and args:
        return Container(args[0])
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return Container(args[0], is_tuple=True)
    if origin is tuple and args and all(item == args[0] for item in args):
        return Container(args[0], is_tuple=True, length=len(args))
    return None


def sequence_kind(annotation: Any) -> Kind | None:
    if annotation is torch.Size:
        sizes = list_of(KINDS[int])  # accepts SymInts too
        return sizes._replace(decode=lambda sizes, where: torch.Size(sizes))
    container = read_container(annotation)
    if container is None:
        return None
    inner, optional = types.strip_optional(container.item)
    item = DTYPE_NAME if inner is torch.dtype else single_kind(inner)
    if item is None:
        return None
    if is_object(item):
        item = _or_none(item) if optional else item
        return list_of(item, container.length)._replace(decode=_decode(item, container))
    inferred = None if container.is_tuple else f"{item.inferred}{'?' * optional}[]"
    if inferred not in _INFERRED_LISTS:
        inferred = None
    if item.schema in CONVERTED_ITEMS and not optional:
        kind = list_of(item, container.length)
        return kind._replace(decode=_decode(item, container), inferred=inferred)
    return None if inferred is None else Kind(inferred, unchanged, inferred=inferred)


def _or_none(item: Kind) -> Kind:
    encode = item.encode

    def check(value: Any, where: str) -> Any:
        return value if value is None else encode(value, where)

    return Kind(f"{item.schema}?", check, decode=check)


def list_of(item: Kind, length: int | None = None) -> Kind:
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
    if length is not None and len(values) != length:
        raise ArgumentError(f"{where}: expected {length} items, got {len(values)}.")


def _encode_dtype(value: Any, where: str) -> str:
    return str(KINDS[torch.dtype].encode(value, where)).removeprefix("torch.")


def _decode_dtype(name: Any, where: str) -> torch.dtype:
    if name not in schemas.dtypes():
        raise ArgumentError(
            f"{where}: expected names of dtypes, such as 'float32', got {short_repr(name)}."
        )
    return schemas.dtypes()[name]


# Inside lists, encode a dtype as its name, because torch.export cannot serialize lists of dtypes.
DTYPE_NAME = Kind("str", _encode_dtype, decode=_decode_dtype)


# --------------------------------------------------------------------------------------------------
# The schema type of any annotation


def leaf_kind(annotation: Any) -> Kind | None:
    """Return an annotation's `Kind`, or None if its values need several arguments of the schema."""
    if (kind := types.find(KINDS, annotation)) is not None:
        return kind
    annotation = without_annotated(annotation)
    inner, optional = types.strip_optional(annotation)
    inner = without_annotated(inner)
    kind = choice_kind(inner) or single_kind(inner) or sequence_kind(inner)
    if kind is None or not optional:
        return kind
    inferred = f"{kind.inferred}?" if kind.inferred in _INFERRED_OPTIONALS else None
    if kind.schema not in _UNCONVERTED_OPTIONALS:
        return kind._replace(is_optional=True, inferred=inferred)
    if inferred is None:
        return None
    return Kind(kind.schema, unchanged, is_optional=True, inferred=inferred)


def argument_type(annotation: Any) -> str | None:
    """Return the schema type that `infer_schema` infers for an annotation.

    Return None if `infer_schema` rejects the annotation. In older PyTorch releases, `infer_schema`
    rejects some annotations that newer releases accept. Return their types anyway, because schemas
    support these types in every release.
    """
    kind = leaf_kind(annotation)
    return None if kind is None else kind.inferred


def parameter_type(parameter: inspect.Parameter) -> str | None:
    schema_type = argument_type(parameter.annotation)
    if schema_type is not None and parameter.default is None and not schema_type.endswith("?"):
        # PEP 484 used to allow `x: Tensor = None` as a shorthand for `Optional[Tensor]`, so accept
        # it.
        schema_type += "?"
    return schema_type


_RETURNS = frozenset({"Tensor", "SymInt", "float", "bool", "Scalar"})


def return_type(annotation: Any) -> str | None:
    if annotation is None or annotation is type(None):
        return "()"
    if typing.get_origin(annotation) is not tuple:
        return _single_return_type(annotation)
    items = [_single_return_type(item) for item in typing.get_args(annotation)]
    results = [item for item in items if item is not None]
    if len(results) < len(items):
        return None
    # The parser reads `(Tensor)` as `Tensor`, so a tuple with one item must be written as
    # `((Tensor))`.
    return write_results([f"({results[0]})"] if len(results) == 1 else results)


def _single_return_type(annotation: Any) -> str | None:
    kind = single_kind(annotation)
    if kind is not None and kind.inferred in _RETURNS:
        return kind.inferred
    if typing.get_origin(annotation) is list and typing.get_args(annotation) == (torch.Tensor,):
        return "Tensor[]"
    is_custom = opaque_types.is_by_reference(annotation)
    return opaque_types.custom_class_name(annotation) if is_custom else None


def without_annotated(annotation: Any) -> Any:
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation
