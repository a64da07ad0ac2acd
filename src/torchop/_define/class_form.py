from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch.library

from torchop._compat import compilers
from torchop._core.define import all_or_nothing, define
from torchop._core.user_rule import rule_names
from torchop._define.declare import declare
from torchop._define.handle import CustomOp
from torchop._define.members import ATTRIBUTES, MEMBERS, Member, is_device_type, known_names
from torchop._errors import MissingKernelError, nearest, short_repr, users_place
from torchop._rules.autograd.formula import Derived
from torchop._schema.naming import OpName

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

if TYPE_CHECKING:  # creating a Protocol class is slow

    class _WithForward(Protocol[P, R_co]):
        @staticmethod
        def forward(*args: P.args, **kwargs: P.kwargs) -> R_co: ...

    class _WithSignature(Protocol[P, R_co]):
        @staticmethod
        def signature(*args: P.args, **kwargs: P.kwargs) -> R_co: ...

    class OperatorDecorator(Protocol):
        # These overloads overlap on purpose, because type checkers use the first match.
        @typing.overload
        def __call__(self, cls: type[_WithForward[P, R]], /) -> CustomOp[P, R]: ...  # type: ignore[overload-overlap]
        @typing.overload
        def __call__(self, cls: type[_WithSignature[P, R]], /) -> CustomOp[P, R]: ...  # type: ignore[overload-overlap]
        @typing.overload
        def __call__(self, cls: type[object], /) -> CustomOp[..., Any]: ...


@compilers.eager_only
def operator(name: str, /, *, lib: torch.library.Library | None = None) -> OperatorDecorator:
    """Define an operator with a class that has kernels and rules as members.

    The decorator replaces the class with the operator's handle, a `CustomOp`. Members are inherited
    from base classes, so several operators can share their rules; to drop an inherited member, set
    it to None. Names that start with an underscore are ignored.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`.
        lib: the library that owns the operator. By default, the operator lives as long as the
            process.

    The class may have the following members. Unless stated otherwise, they are static functions:

    - `forward`: the kernel for all devices. The schema is inferred from the annotations.
    - `cpu`, `cuda` and all other device types: kernels for these devices. Without `forward`, the
      class must also provide the schema, either as a string `schema` or through the annotations of
      a function `signature`, which is never called.
    - `fake`, `vmap`, `backward`, `jvp` and `setup_context`: the functions for the methods
      `register_fake`, `register_vmap` and so on. `fake` may also be a dict of keyword arguments of
      `register_fake`, `backward` may be `torchop.derived`, and `vmap` may be `"sequential"`.
    - `backward_kernel`, instead of `backward` and `setup_context`: see `register_autograd`.
    - `contiguous_grads`: True to pass contiguous gradients to `backward` or `backward_kernel`,
      which is necessary if it ignores strides.
    - `autocast`: a dtype, a policy such as `"low_precision"`, or a dict of these by device type.
    - `layouts`: a dict from arguments to layouts; see `register_layout`.
    - `torch_dispatch`: a dict from modes or Tensor subclasses to functions.
    - `inplace`, `out`: True, or a name, to also define the in-place or the out= form; see
      `derive_inplace` and `derive_out`.
    - `examples`: a function that yields sample inputs for `opcheck`, each as a tuple of arguments
      or a dict of arguments by name.
    - `valid`: a function that returns whether arguments are valid. Tools use it to filter the
      inputs that they generate from `examples`.
    - `inverse`, `checkpoint_policy` and the name of every other `torchop.Rule`: the value to
      register for this rule.
    - `providers`: a dict from the names of providers to dicts of arguments of `register_kernel`.
      Each dict must contain `device_types` and `function`, the kernel.
    - `mutates_args` (by default `()`), `schema`, `tags`, `effects`, `compile`, `priority` and
      `residuals`: options of `custom_op`.

    Returns:
        A decorator, which returns the `CustomOp`.

    Raises:
        TypeError: a member is unknown, not static, or missing. Nothing is defined.
        TypeError, ValueError: see `custom_op` and the registration methods. If one of these raises,
            the operator is deregistered, so nothing remains.

    Example:
        >>> import torch, torchop
        >>> @torchop.operator("docs::halved")
        ... class halved:
        ...     '''Halves a tensor.'''
        ...
        ...     @staticmethod
        ...     def forward(x: torch.Tensor) -> torch.Tensor:
        ...         return x / 2
        ...
        ...     @staticmethod
        ...     def fake(x):
        ...         return torch.empty_like(x)
        ...
        ...     @staticmethod
        ...     def inverse(output):
        ...         return output * 2
        >>> halved(torch.ones(2))
        tensor([0.5000, 0.5000])
        >>> torchop.inverse(halved)(torch.ones(2))
        tensor([2., 2.])

    Modeled after `torch.autograd.Function`.
    """
    place = users_place()
    op_name = OpName.parse_new(name)

    @compilers.eager_only
    def decorate(cls: Any) -> CustomOp[..., Any]:
        plan = read_class(str(op_name), cls)
        devices = None if "forward" in plan.members else ()

        def build() -> CustomOp[..., Any]:
            declaration = declare(
                op_name, plan.function, place, device_types=devices, **plan.attributes
            )
            op: CustomOp[..., Any] = define(declaration, lib).handle
            for device, kernel in plan.kernels.items():
                op.register_kernel(device, kernel)
            for rule, value in plan.rules.items():
                op.register(rule, value)
            for member, (registers, *_) in MEMBERS.items():
                if member in plan.members and registers is not None:
                    registers(op, plan.members[member], plan.members)
            return op

        return all_or_nothing(op_name, build)

    return typing.cast("OperatorDecorator", decorate)


class ClassReading(NamedTuple):
    """The members of an operator class, grouped by how they are registered.

    Attributes:
        function: the function that defines the operator, usually the member `forward`.
        attributes: the members that are passed to `custom_op` as options, such as `tags`.
        kernels: maps device types to kernels.
        members: the members that are listed in `MEMBERS`, such as `backward`.
        rules: the members that are named after a `torchop.Rule`, such as `inverse`.
    """

    function: Callable[..., Any]
    attributes: Mapping[str, Any]
    kernels: Mapping[str, Callable[..., Any]]
    members: Mapping[str, Any]
    rules: Mapping[str, Any]


def read_class(op_name: str, cls: Any) -> ClassReading:
    if not isinstance(cls, type):
        raise TypeError(
            f"operator({short_repr(op_name)}) must decorate a class, got {short_repr(cls)}; for a "
            "function use torchop.custom_op."
        )
    what = f"{op_name}: the class {cls.__qualname__}"
    if issubclass(cls, torch.autograd.Function):
        raise TypeError(
            f"{what} is a torch.autograd.Function. Remove this base class, and 'ctx' of forward."
        )
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
        elif name == "device_types":  # an easy mistake, because custom_op has this option
            raise TypeError(
                f"{what} has the member 'device_types'. Name the kernel for one device after the "
                "device, such as 'cpu'. The member 'forward' is the kernel for all devices."
            )
        else:
            raise TypeError(
                f"{what} has the member {short_repr(name)}, which is neither a rule nor a device "
                f"type{nearest(name, known_names())}. Names of helpers must start with an "
                "underscore."
            )
    for name in members:
        needs = MEMBERS[name].needs
        if needs and members.keys().isdisjoint(needs):
            needed = " or ".join(map(repr, needs))
            raise TypeError(f"{what} has the member {short_repr(name)} without {needed}.")
    if isinstance(members.get("backward"), Derived) and members.get("contiguous_grads"):
        raise TypeError(
            f"{what} has the member 'contiguous_grads' with a derived 'backward', but a derived "
            "backward respects strides. Remove 'contiguous_grads'."
        )
    function = _function(what, cls, members, attributes, kernels)
    return ClassReading(function, attributes, kernels, members, rules)


def _public_members(cls: type) -> dict[str, Any]:
    """Return the public members of a class and its base classes.

    A class can drop an inherited member by setting it to None, as with `__hash__ = None`.
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
        raise TypeError(
            f"{what} has {kind} {short_repr(name)}, but an operator has no instances: write "
            f"@staticmethod above it, or staticmethod({name}) for a function from elsewhere."
        )
    return raw


def _check_member(what: str, name: str, value: Any, member: Member) -> None:
    if not member.accepts(value):
        raise TypeError(
            f"{what} has the member {short_repr(name)}, which must be {member.takes}; got "
            f"{short_repr(value)}."
        )


def _function(
    what: str,
    cls: type,
    members: Mapping[str, Any],
    attributes: Mapping[str, Any],
    kernels: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return the member `forward`, or without this member, a function that raises when called.

    The raising function takes its signature from the member `signature`, or else from a kernel.
    """
    if "forward" in members:
        if "signature" in members:
            raise TypeError(
                f"{what} has both 'forward' and 'signature'; the annotations of 'forward' are the "
                "signature."
            )
        return _identified(cls, members["forward"])
    if not kernels:
        raise TypeError(
            f"{what} has no kernel: it needs the member 'forward', for every device, or one named "
            "after a device type, such as 'cpu'."
        )
    if "signature" in members:
        template = members["signature"]
    elif attributes.get("schema") is not None:
        template = next(iter(kernels.values()))
    else:
        raise TypeError(
            f"{what} has kernels for {', '.join(kernels)}, but no signature. "
            "Add the static function 'signature', with annotations, or the string 'schema'."
        )

    def no_kernel(*args: Any, **kwargs: Any) -> Any:
        raise MissingKernelError(
            f"{what} has kernels for {', '.join(kernels)} only. Add the member 'forward', which "
            "runs if a kernel is disabled."
        )

    code = getattr(inspect.unwrap(template), "__code__", None)
    if code is not None:  # error messages use it to locate the operator
        no_kernel.__code__ = no_kernel.__code__.replace(
            co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
        )
    return _identified(cls, functools.wraps(template)(no_kernel))


def _identified(cls: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with the name, module and docstring of the class.

    The operator's handle takes these attributes from the function. We copy the function instead of
    wrapping it, because a wrapper would add a Python frame to every call.
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
