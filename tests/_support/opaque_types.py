"""Classes registered as opaque types, and classes whose attributes raise or mislead."""

from __future__ import annotations

from typing import Any

import torch
from torch._library import opaque_object
from torch._opaque_base import OpaqueBase


class Reference(OpaqueBase):
    """An opaque type whose objects are inputs of compiled graphs.

    Since 2.15, PyTorch calls this kind of opaque type "symbolic".
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.number})"


class Constant(OpaqueBase):
    """An opaque type whose objects are constants in compiled graphs.

    Since 2.15, PyTorch calls this kind of opaque type "constant".
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"Constant({self.number})"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Constant({self.number})", {"Constant": Constant}


class Derived(Reference):
    """A subclass that is not registered itself, so PyTorch treats it like its base class."""


opaque_object.register_opaque_type(Reference, typ="reference")
opaque_object.register_opaque_type(Constant, typ="value")

# The names of the types in schemas.
REFERENCE = opaque_object.get_opaque_type_name(Reference)
CONSTANT = opaque_object.get_opaque_type_name(Constant)


class Slotted:
    __slots__ = ("number",)

    def __repr__(self) -> str:
        return "Slotted()"


class Impostor:
    """Reports `torch.Tensor` as its `__class__`, but is not a tensor in C++."""

    __class__ = property(lambda self: torch.Tensor)  # type: ignore[assignment]


def _raises(self: Any, *args: Any) -> Any:
    raise AssertionError("somebody asked an object")


class Touchy:
    """Raises on any comparison, conversion, iteration or call."""

    __eq__ = __ne__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = _raises
    __hash__ = __contains__ = __getitem__ = __call__ = _raises  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Touchy()"


class Overriding:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "overridden"

    def __repr__(self) -> str:
        return "Overriding()"


class Computing:
    """Has a `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __repr__(self) -> str:
        return "Computing()"


class OfNoClass:
    """Raises when `__class__` is read, which PyTorch does for every argument."""

    __class__ = property(_raises)  # type: ignore[assignment]


class _TouchyMeta(type):
    __eq__ = __instancecheck__ = __subclasscheck__ = __getattr__ = _raises
    __hash__ = _raises  # type: ignore[assignment]


class OfTouchyClass(metaclass=_TouchyMeta):
    """Raises when its class is compared, hashed or used in isinstance."""
