"""A class that describes an operator, read and checked before anything is defined."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchop._derived import Derived
from torchop._errors import MissingKernelError, OperatorClassError
from torchop._members import ATTRIBUTES, MEMBERS, Member, is_device_type, known_names
from torchop._rule import nearest, rule_names


class ClassPlan(NamedTuple):
    """A class that was read: what `custom_op` is called with, and what is registered then."""

    name: str
    function: Callable[..., Any]
    has_default_kernel: bool
    attributes: Mapping[str, Any]
    kernels: Mapping[str, Callable[..., Any]]
    members: Mapping[str, Any]
    rules: Mapping[str, Any]


def read_class(op_name: str, cls: Any) -> ClassPlan:
    """Reads a class, and checks all that can be known before the operator exists.

    Raises:
        OperatorClassError: naming the member.
    """
    if not isinstance(cls, type):
        raise OperatorClassError(
            f"operator({op_name!r}) decorates a class, got {cls!r}; for a function use "
            "torchop.custom_op."
        )
    what = f"{op_name}: the class {cls.__qualname__}"
    members: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    for name, raw in _public_members(cls).items():
        value = _unwrapped(what, name, raw)
        if name in ATTRIBUTES:
            attributes[name] = value
        elif name in MEMBERS:
            _check_member(what, name, value, MEMBERS[name])
            members[name] = value
        elif name in rule_names():
            rules[name] = value
        elif is_device_type(name):
            _check_member(what, name, value, Member())
            kernels[name] = value
        elif name == "device_types":  # as in custom_op
            raise OperatorClassError(
                f"{what} has the member 'device_types'. The kernel for a device is the member that "
                "is named after it, such as 'cpu', and 'forward' is the one for every device."
            )
        else:
            raise OperatorClassError(
                f"{what} has the member {name!r}, which is neither a rule nor a device type"
                f"{nearest(name, known_names())}. The name of a helper starts with an underscore."
            )
    for name in members:
        needs = MEMBERS[name].needs
        if needs and members.keys().isdisjoint(needs):
            needed = " or ".join(map(repr, needs))
            raise OperatorClassError(f"{what} has the member {name!r} without {needed}.")
    if isinstance(members.get("backward"), Derived) and members.get("opaque"):
        raise OperatorClassError(
            f"{what} has the member 'opaque' beside a derived 'backward', which compilers need not "
            "trace; take it out."
        )
    function = _function(what, cls, members, attributes, kernels)
    return ClassPlan(op_name, function, "forward" in members, attributes, kernels, members, rules)


def _public_members(cls: type) -> dict[str, Any]:
    """The members as they are written, those of base classes included; the nearest one counts.

    None takes back what a base class has, as Python does it with `__hash__`.
    """
    members = {name: raw for base in reversed(cls.__mro__) for name, raw in vars(base).items()}
    return {
        name: raw for name, raw in members.items() if not name.startswith("_") and raw is not None
    }


def _unwrapped(what: str, name: str, raw: Any) -> Any:
    if isinstance(raw, staticmethod):
        return raw.__func__
    if isinstance(raw, (types.FunctionType, classmethod, property)):
        kind = "a method" if isinstance(raw, types.FunctionType) else f"a {type(raw).__name__}"
        raise OperatorClassError(
            f"{what} has {kind} {name!r}, but an operator has no instances: write @staticmethod "
            f"above it, or staticmethod({name}) for a function from elsewhere."
        )
    return raw


def _check_member(what: str, name: str, value: Any, member: Member) -> None:
    if not member.accepts(value):
        raise OperatorClassError(
            f"{what} has the member {name!r}, which is to be {member.takes}; got {value!r}."
        )


def _function(
    what: str,
    cls: type,
    members: Mapping[str, Any],
    attributes: Mapping[str, Any],
    kernels: Mapping[str, Any],
) -> Callable[..., Any]:
    """The function that `custom_op` makes the operator of."""
    if "forward" in members:
        if "signature" in members:
            raise OperatorClassError(
                f"{what} has both 'forward' and 'signature'; the annotations of 'forward' are the "
                "signature."
            )
        return _identified(cls, members["forward"])
    if not kernels:
        raise OperatorClassError(
            f"{what} has no kernel: it needs the member 'forward', for every device, or one named "
            "after a device type, such as 'cpu'."
        )
    if "signature" in members:
        described = members["signature"]
    elif attributes.get("schema") is not None:
        described = next(iter(kernels.values()))
    else:
        raise OperatorClassError(
            f"{what} has kernels for {', '.join(kernels)}, and nothing that says what all of them "
            "take. Add the static function 'signature', with annotations, or 'schema', a string."
        )

    def no_kernel(*args: Any, **kwargs: Any) -> Any:
        raise MissingKernelError(
            f"{what} has no kernel for every device, which would run where one is disabled; it has "
            f"kernels for {', '.join(kernels)}."
        )

    code = getattr(inspect.unwrap(described), "__code__", None)
    if code is not None:  # messages say where an operator was defined
        no_kernel.__code__ = no_kernel.__code__.replace(
            co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
        )
    return _identified(cls, functools.wraps(described)(no_kernel))


def _identified(cls: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the name of the class, which the handle and redefinitions go by.

    A copy and not a wrapper, which would be one more frame in every call.
    """
    if isinstance(function, types.FunctionType):
        copy = types.FunctionType(
            function.__code__,
            function.__globals__,
            cls.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__dict__.update(vars(function))
        copy.__annotations__ = dict(function.__annotations__)
    else:

        @functools.wraps(function)
        def copy(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    copy.__name__ = cls.__name__
    copy.__qualname__ = cls.__qualname__
    copy.__module__ = cls.__module__
    copy.__doc__ = cls.__doc__ or function.__doc__
    return copy
