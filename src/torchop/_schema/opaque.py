"""Opaque types: classes whose objects PyTorch passes to and from operators unchanged."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from torchop._compat import compilers, opaque_types
from torchop._schema.types import spell

Class = TypeVar("Class", bound=type)
# Objects of these classes cannot be opaque (passed through a graph unchanged), because Dynamo
# traces into them or PyTorch flattens them.
_TRACED = (
    torch.Tensor,
    torch.nn.Module,
    tuple,
    list,
    dict,
    set,
    frozenset,
    str,
    int,
    float,
    complex,
)
# PyTorch looks for these attributes on every object that it passes to an operator or a graph, so a
# class that defines one of them would be passed differently. See `tracing_with_real` and
# `maybe_to_fake_obj` in torch/_library/fake_class_registry.py.
_READ_BY_PYTORCH = ("__torch_function__", "__obj_flatten__", "tracing_mode")


@overload
def opaque(cls: Class, /, *, value: bool = False) -> Class: ...


@overload
def opaque(cls: None = None, /, *, value: bool = False) -> Callable[[Class], Class]: ...


@compilers.eager_only
def opaque(cls: Any = None, /, *, value: bool = False) -> Any:
    """Let operators take and return objects of a class. Use it as a decorator, or call it.

    You can then annotate arguments, results and the fields of structures with the class, with
    `Optional` of it, or with a list of it. For a class from another package, call
    `torchop.opaque(Class)`. Subclasses are registered along with the class.

    By default, an object is passed *by reference*: it is an input of the compiled graph, and
    kernels may modify it. Compilers therefore keep every call that takes such an object, in the
    original order. If an operator does not modify the object, pass `effects="none"` to `custom_op`,
    so that compilers may remove and merge its calls. In compiled code, the attributes of the object
    are known only at run time, so fake kernels and backward formulas cannot read them.

    With `value=True`, an object is baked into the compiled graph as a constant, so the class must
    be immutable, such as a frozen dataclass. A call with an object that compares unequal compiles a
    new graph. For this reason, `value=True` also makes `==` stricter: equal objects must have the
    same class, and fields of the same types and signs. So 1 differs from True and 1.0, and 0.0
    differs from -0.0.

    `torch.Generator`, `ProcessGroup` and `DeviceMesh` need no registration.

    Args:
        cls: the class.
        value: whether to pass objects by value.

    Returns:
        The class itself.

    Raises:
        TypeError: PyTorch cannot pass objects of this class. The message says why.

    Example:
        >>> import dataclasses, torch, torchop
        >>> @torchop.opaque
        ... class Counter:
        ...     calls = 0
        >>> @torchop.opaque(value=True)
        ... @dataclasses.dataclass(frozen=True)
        ... class Options:
        ...     factor: float = 2.0
        >>> @torchop.custom_op("docs::count", mutates_args=("counter",))
        ... def count(x: torch.Tensor, counter: Counter, options: Options) -> torch.Tensor:
        ...     counter.calls += 1
        ...     return x * options.factor
        >>> counter = Counter()
        >>> count(torch.ones(2), counter, Options())
        tensor([2., 2.])
        >>> counter.calls
        1

    Based on `register_opaque_type` of PyTorch, which has no public name.
    """
    if cls is None:
        return functools.partial(opaque, value=value)
    if not isinstance(cls, type):
        raise TypeError(f"torchop.opaque expects a class, got {spell(type(cls))}.")
    if not _is_registered(cls, value=value):
        _check(cls)
        if value:
            _prepare_value(cls)
        _register(cls, is_value=value)
    return cls


def _is_registered(cls: type, *, value: bool) -> bool:
    registered = opaque_types.registered_kind(cls)
    if registered is None or registered == value:
        return registered is not None
    kinds = ("by reference", "by value")
    raise TypeError(
        f"{spell(cls)} is already registered to be passed {kinds[not value]}. PyTorch cannot "
        f"change this, so remove torchop.opaque(value={value})."
    )


def _check(cls: type) -> None:
    name = spell(cls)
    if issubclass(cls, enum.Enum):
        raise TypeError(f"{name} is an Enum. Operators support Enums without torchop.opaque.")
    traced = next((base for base in _TRACED if issubclass(cls, base)), None)
    if traced is not None or cls.__module__ == "builtins":
        what = "a built-in class" if traced in (None, cls) else f"a subclass of {spell(traced)}"
        raise TypeError(
            f"{name} is {what}, which compilers trace in their own way. Write a class that has "
            "such an object as an attribute, and register that class."
        )
    if not cls.__weakrefoffset__:
        raise TypeError(
            f"{name} has no weak references, which PyTorch needs to trace its objects. Add "
            "'__weakref__' to __slots__, or define a dataclass with weakref_slot=True."
        )
    for attribute in _READ_BY_PYTORCH:
        if hasattr(cls, attribute):
            raise TypeError(
                f"{name} has the attribute {attribute!r}, which PyTorch would read and call while "
                "it traces. Rename the attribute, or register a class without it."
            )


def _register(cls: type, *, is_value: bool) -> None:
    try:
        opaque_types.register(cls, is_value=is_value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{spell(cls)} cannot be an opaque type: {error} Define a subclass of it and register "
            "that, or a class that has such an object as an attribute."
        ) from error


# --------------------------------------------------------------------------------------------------
# Objects that are passed by value


def _prepare_value(cls: type) -> None:
    """Add the methods that PyTorch needs to store objects of the class as graph constants."""
    name = spell(cls)
    is_dataclass = dataclasses.is_dataclass(cls)
    is_frozen = is_dataclass and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if is_dataclass and not is_frozen:
        raise TypeError(
            f"{name} is a dataclass whose objects can change, but graphs would store them as "
            "constants. Define it with @dataclass(frozen=True), or register it without value=True."
        )
    fix = f"Define {name} with @dataclass(frozen=True)"
    equal: Any = cls.__eq__
    if equal is object.__eq__:
        raise TypeError(
            f"{name} has no __eq__, so a compiler could not detect that another object needs "
            f"another graph. {fix}, or define __eq__ and __hash__."
        )
    if cls.__hash__ is None:
        raise TypeError(
            f"{name} has no __hash__, which PyTorch's caches need. {fix}, or define it."
        )
    if not hasattr(cls, "__fx_repr__"):
        if not is_dataclass:
            raise TypeError(
                f"{name} has no __fx_repr__, so PyTorch could not write its objects in the code of "
                f"a graph. {fix}, or define __fx_repr__ to return an expression and the objects "
                f"that it names, such as ('{cls.__name__}(1)', {{'{cls.__name__}': "
                f"{cls.__name__}}})."
            )
        cls.__fx_repr__ = _write_dataclass  # type: ignore[attr-defined]
    cls.__eq__ = _exactly(equal)  # type: ignore[method-assign, assignment]


def _exactly(equal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap `__eq__` so that equal objects must also have fields of the same types and signs.

    Compilers use `__eq__` to decide whether they can reuse a graph. In Python, 1, 1.0 and True are
    equal, but a graph that was compiled for one of them would be wrong for the others.
    """

    @functools.wraps(equal)
    def equal_exactly(self: Any, other: Any) -> Any:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        result = equal(self, other)
        return result and self.__fx_repr__()[0] == other.__fx_repr__()[0]

    return equal_exactly


def _write_dataclass(self: Any) -> tuple[str, dict[str, Any]]:
    """Return an expression that recreates a dataclass object, and the objects that it refers to.

    Installed as the method `__fx_repr__`, which PyTorch calls when it generates a graph's code.
    """
    names: dict[str, Any] = {}
    return _written(self, spell(type(self)), names), names


def _written(value: Any, where: str, names: dict[str, Any]) -> str:
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if type(value) is tuple:
        return f"({''.join(f'{_written(item, where, names)}, ' for item in value)})"
    if type(value) is list:
        return f"[{', '.join(_written(item, where, names) for item in value)}]"
    if type(value) is dict:
        items = [
            f"{_written(k, where, names)}: {_written(v, where, names)}" for k, v in value.items()
        ]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return f"{_name(constant_of_torch, names)}({str(value)!r})"
    if isinstance(value, torch.device):
        return f"{_name(device_of_torch, names)}({str(value)!r})"
    if isinstance(value, enum.Enum):
        return f"{_name(type(value), names)}[{value.name!r}]"
    if hasattr(value, "__fx_repr__") and type(value).__fx_repr__ is not _write_dataclass:
        text, used = value.__fx_repr__()
        names |= used
        return str(text)
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        parts = [f"{n}={_written(getattr(value, n), f'{where}.{n}', names)}" for n in fields]
        return f"{_name(type(value), names)}({', '.join(parts)})"
    raise TypeError(
        f"{where} has the type {spell(type(value))}, which cannot be written in the code of a "
        "graph. Use numbers, strings, dtypes, devices, Enums and frozen dataclasses of these, or "
        "define __fx_repr__."
    )


# In the expressions of `_write_dataclass`, we call these functions instead of naming torch.float32
# and the like directly. PyTorch renames imports from its own modules (`add_global` in
# torch/fx/graph.py), so the expression would no longer find the name.


def constant_of_torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def device_of_torch(text: str) -> torch.device:
    return torch.device(text)


def _name(function: Any, names: dict[str, Any]) -> str:
    # Start with a prefix, because Inductor uses the name inside a class, where Python would mangle
    # a name that starts with two underscores.
    name = "opaque_" + re.sub(r"\W", "_", f"{function.__module__}.{function.__qualname__}")
    names[name] = function
    return name
