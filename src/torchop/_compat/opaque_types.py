"""Register opaque types: classes whose objects PyTorch passes to operators unconverted.

PyTorch passes an object *by reference* as an input of a graph, or *by value* as a constant in the
graph. Since 2.15, PyTorch calls these classes custom classes, and the two kinds symbolic and
constant.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
from typing import Any, cast

import torch
from torch._library import opaque_object

from torchop._compat import traced_objects

_module: Any = opaque_object
_HAS_NEW_NAMES = hasattr(_module, "register_custom_class")
_KINDS = ("symbolic", "constant") if _HAS_NEW_NAMES else ("reference", "value")
_REGISTER = "register_custom_class" if _HAS_NEW_NAMES else "register_opaque_type"
_is_reference: Any = getattr(opaque_object, f"is_opaque_{_KINDS[0]}_type", lambda cls: False)
_is_value: Any = getattr(opaque_object, f"is_opaque_{_KINDS[1]}_type", lambda cls: False)
_NOT_IN_SCHEMAS = re.compile(r"[^\w.]")


def custom_class_name(annotation: Any) -> str | None:
    """Return the name that schemas use for a class, or None if they do not support the class.

    Schemas support PyTorch's opaque types, registered enums, and Generator.
    """
    if not isinstance(annotation, type):
        return None
    # Since 2.15, `is_opaque_type` is deprecated and logs a warning, so prefer the new name.
    is_custom = getattr(opaque_object, "is_custom_class", None) or opaque_object.is_opaque_type
    if annotation.__module__.startswith("torch.distributed.") and not is_custom(annotation):
        _register_distributed_types()
    if not is_custom(annotation):
        # Before 2.13, Generator is a schema type in its own right rather than a custom class.
        return "Generator" if annotation is torch.Generator else None
    return opaque_object.get_opaque_type_name(annotation)


def _register_distributed_types() -> None:
    """Make PyTorch register ProcessGroup and DeviceMesh, as it does when DTensor is used."""
    module = importlib.import_module("torch.distributed.device_mesh")
    getattr(module, "_register_distributed_opaque_types", lambda: None)()


def is_by_reference(cls: Any) -> bool:
    return isinstance(cls, type) and bool(_is_reference(cls))


def is_by_value(cls: Any) -> bool:
    return isinstance(cls, type) and bool(_is_value(cls))


def registered_kind(cls: type) -> bool | None:
    """Return whether `cls` itself is registered by value, or None if it is not registered."""
    info = opaque_object._OPAQUE_TYPES.get(cls)
    return None if info is None else info.opaque_typ == _KINDS[1]


def names_reference(name: str) -> bool:
    """Return whether a type name in a schema refers to a class that is passed by reference."""
    info = opaque_object._OPAQUE_TYPES_BY_NAME.get(name)
    return info is not None and info.opaque_typ == _KINDS[0]


def register(cls: type, *, is_value: bool) -> None:
    """Register a class with PyTorch.

    Raises:
        TypeError: the metaclass of `cls` cannot be extended, or PyTorch rejects the class.
        ValueError: PyTorch rejects the class.
    """
    if not is_value:
        for each in _with_subclasses(cls):
            _add_metaclass(each)
        traced_objects.register(cls)
    # The qualified name of a class may contain `<locals>`, which is not allowed in schemas.
    qualname = cls.__qualname__
    name = _NOT_IN_SCHEMAS.sub("_", qualname)
    forget = getattr(torch._C, "_unregister_opaque_type", None)
    if forget is not None and torch._C._is_opaque_type_registered(f"{cls.__module__}.{name}"):
        # An earlier class from the same definition is still registered under this name. 2.15
        # rejects a second class with the same name, so remove the earlier one.
        forget(f"{cls.__module__}.{name}")
    try:
        if name != qualname:
            cls.__qualname__ = name
        getattr(_module, _REGISTER)(cls, typ=_KINDS[is_value])
    finally:
        if name != qualname:
            cls.__qualname__ = qualname


def _with_subclasses(cls: type) -> list[type]:
    subclasses: list[type] = cls.__subclasses__()
    return [cls, *(each for subclass in subclasses for each in _with_subclasses(subclass))]


@functools.cache
def _reference_metaclass() -> type:
    """Return the metaclass that makes `isinstance` accept the stand-ins for objects in a trace."""
    place, name = "torch._opaque_base", "OpaqueBaseMeta"
    if _HAS_NEW_NAMES:
        place, name = "torch._custom_class_base", "CustomClassBaseMeta"
    return cast(type, getattr(importlib.import_module(place), name))


@functools.cache
def _combined(metaclass: type) -> type:
    added = _reference_metaclass()
    # Dynamo ignores an inherited `__instancecheck__` (`call_isinstance` in
    # torch/_dynamo/variables/builtin.py).
    check = {"__instancecheck__": added.__instancecheck__}
    return type("OpaqueMeta", (added, metaclass), check)


def _add_metaclass(cls: type) -> None:
    """Make PyTorch's metaclass the metaclass of an existing class.

    The class must be changed in place rather than replaced, because other modules may have imported
    it already.
    """
    metaclass = type(cls)
    if issubclass(metaclass, _reference_metaclass()):
        return
    if metaclass is not type:
        cls.__class__ = _combined(metaclass)
        return
    # Python permits this assignment only if the old metaclass is mutable, and `type` is not. So
    # write the field `ob_type` directly, as PyTorch does for Generator (`_set_generator_metaclass`
    # in torch/csrc/Generator.cpp). This is safe because PyTorch's metaclass has the same layout as
    # `type`.
    added = _reference_metaclass()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(added))
    end_of_header = id(cls) + object.__basicsize__
    ctypes.c_void_p.from_address(end_of_header - ctypes.sizeof(ctypes.c_void_p)).value = id(added)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))
