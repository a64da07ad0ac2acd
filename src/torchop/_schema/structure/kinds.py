"""The kinds of values that become one argument of the flat operator, checked and converted.

A value of a structure is *encoded* into a value of the schema's type, and *decoded* for the kernel.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchop._compat import schemas
from torchop._compat.classes import FakeScriptObject
from torchop._errors import ArgumentError
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

    @property
    def holds_tensors(self) -> bool:
        return "Tensor" in self.schema


def wrong_type(where: str, expected: str, value: Any) -> ArgumentError:
    """The error for a value that is not of the type that the annotation says."""
    # Dynamo cannot follow how types are spelled, and would report that instead.
    got = type(value).__name__ if torch.compiler.is_dynamo_compiling() else types.spell(type(value))
    return ArgumentError(f"{where}: expected {expected}, got {got}.")


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
