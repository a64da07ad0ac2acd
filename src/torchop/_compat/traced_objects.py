"""Stand-ins without contents for objects of opaque types in a trace.

PyTorch passes an argument of a traced call as a `FakeScriptObject`, which raises when an attribute
is read. A result of a traced call, however, is the object that the fake kernel returned, so traced
code could read its attributes, and the values would end up as constants in the graph. So torchop
replaces the result with a `TracedObject`, which raises as well.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torchop._compat.classes import FakeScriptObject

# An opaque type stores the class of its traced objects in this attribute.
_CLASS = "_torchop_traced"
# Classes whose objects may be replaced with traced objects (stand-ins without contents). Objects of
# all other classes are kept, because PyTorch may need them.
_replaceable: weakref.WeakSet[type] = weakref.WeakSet()


def register(cls: type) -> None:
    _replaceable.add(cls)
    _hold_objects_weakly()


def is_replaceable(cls: type) -> bool:
    """Return whether torchop may replace objects of this class with stand-ins in a trace."""
    return not issubclass(cls, TracedObject) and any(base in _replaceable for base in cls.__mro__)


class TracedObject:
    """Base class of stand-ins in a trace. Reading an attribute of a stand-in raises an error."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Skip the opaque type's own `__init_subclass__`, which may register subclasses."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        raise _no_value(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _no_value(self, name)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<a traced {type(self).__name__}>"

    def __reduce__(self) -> Any:
        return make, (class_of(self),)


def _no_value(value: Any, name: str) -> AttributeError:
    return AttributeError(
        f"the attribute {name!r} of this {type(value).__name__} has no value in a trace, because "
        "an operator will return the object when the graph runs. Pass the object to an operator "
        "whose kernel reads the attribute.",
        name=name,
        obj=value,
    )


def make(cls: type) -> Any:
    """Return a stand-in for objects of a class, or raise TypeError if Python cannot create it."""
    found = cls.__dict__.get(_CLASS)
    if found is None:
        names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        found = type(cls)(cls.__name__, (TracedObject, cls), names)
        setattr(cls, _CLASS, found)
    return object.__new__(found)


def class_of(value: Any) -> type:
    """Return the class of an object, or of the object that it stands for in a trace."""
    if isinstance(value, FakeScriptObject):
        value = value.real_obj
    cls = type(value)
    return cls.__mro__[2] if issubclass(cls, TracedObject) else cls


def has_no_contents(value: Any) -> bool:
    return issubclass(type(value), (FakeScriptObject, TracedObject))


# --------------------------------------------------------------------------------------------------
# Lifetimes


class _Weak(NamedTuple):
    reference: weakref.ref[Any]
    cls: type


def _hold_objects_weakly() -> None:
    """Make traced objects hold only weak references to the objects that they stand for.

    The nodes of a compiled graph hold the traced arguments (`node.meta`), so with strong
    references, the arguments of the traced call would live until `torch.compiler.reset()`.
    """
    if isinstance(FakeScriptObject.__dict__.get("real_obj"), property):
        return
    initialize = FakeScriptObject.__init__

    def initialize_weakly(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        value = self.real_obj
        if is_replaceable(type(value)):
            hold(self, _Weak(weakref.ref(value), type(value)))

    def real_object(self: Any) -> Any:
        values = object.__getattribute__(self, "__dict__")
        if "real_obj" not in values:
            raise AttributeError("real_obj")
        held = values["real_obj"]
        if type(held) is not _Weak:
            return held
        value = held.reference()
        return make(held.cls) if value is None else value

    def hold(self: Any, value: Any) -> None:
        object.__getattribute__(self, "__dict__")["real_obj"] = value

    changed: Any = FakeScriptObject
    changed.__init__ = initialize_weakly
    changed.real_obj = property(real_object, hold)
