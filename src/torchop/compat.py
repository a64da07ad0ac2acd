"""Drop-in replacements for the functions that inference engines use to register operators.

Calls to operators of `torch.library.custom_op` are slow, so inference engines have their own
functions to register operators: `direct_register_custom_op` in vLLM and SGLang,
`register_custom_op` in SGLang, and `fast_custom_op` in TensorRT-LLM. The functions in this module
have the same signatures, but define operators with `torchop.custom_op`, which makes calls faster.
As in the engines, a result may share memory with an argument or with another result. This only
causes a warning for operators of this module, whereas other operators of torchop raise an error.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import torch
import torch.library
from typing_extensions import TypedDict, Unpack  # Python 3.10 has no Unpack

from torchop import CustomOp, OperatorNameError, RuleSignatureError, register_fake
from torchop._compat import compilers, dispatch
from torchop._core.define import define
from torchop._core.registry import check_owner
from torchop._define.declare import declare
from torchop._errors import users_place
from torchop._schema.callables import check_callable
from torchop.extend import Operator, OpName, all_or_nothing, short_repr

__all__ = ["direct_register_custom_op", "register_custom_op"]

Function = TypeVar("Function", bound=Callable[..., Any])
Tags: TypeAlias = "torch.Tag | Iterable[torch.Tag] | None"


class _Registration(NamedTuple):
    """The arguments of a registration, stored so that we can recognize a call that repeats them."""

    function: Callable[..., Any]
    mutates_args: str | tuple[str, ...]
    devices: tuple[str | None, ...]
    fake_impl: Callable[..., Any] | None
    # A strong reference would keep the caller's library alive.
    library: weakref.ref[torch.library.Library] | None
    tags: tuple[Any, ...]
    out_shape: int | str | None = None
    out_dtype: torch.dtype | None = None


# All registrations so far. If a second engine in the same process registers the same operators
# again, it gets the existing operators instead of an error.
_registrations: dict[OpName, _Registration] = {}


@compilers.eager_only
def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: torch.library.Library | None = None,
    dispatch_key: str | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> CustomOp[..., Any]:
    """Register an operator, with the signature of vLLM's and SGLang's `direct_register_custom_op`.

    Args:
        op_name: `"namespace::name"`, or just `"name"`. Without a namespace, the operator is defined
            in the namespace of `target_lib`, or else in one named after the calling package, such
            as `vllm`.
        op_func: the function that implements the operator. The schema is inferred from its
            annotations.
        mutates_args: the names of the tensor arguments that the function writes to.
        fake_impl: the fake kernel.
        target_lib: the library that owns the operator. By default the operator is permanent.
        dispatch_key: the dispatch key of the device for which the function is the kernel, such as
            `"CUDA"`. None means all devices.
        tags: a tuple of `torch.Tag`.

    Returns:
        The operator. (The engines' own functions return None, so their callers look up the operator
        in `torch.ops`.)

    Raises:
        ValueError: a name, annotation, `mutates_args` or `dispatch_key` is invalid. Nothing is
            defined.
        TypeError: `fake_impl` does not accept the operator's arguments. Nothing is defined.

    Warns:
        UserWarning: on the first call whose result shares memory with an argument or another
            result.

    Example:
        >>> import torch
        >>> from torchop.compat import direct_register_custom_op
        >>> def add_into(x: torch.Tensor, out: torch.Tensor) -> None:
        ...     out.add_(x)
        >>> op = direct_register_custom_op("docs::add_into", add_into, mutates_args=["out"])
        >>> out = torch.ones(2)
        >>> torch.ops.docs.add_into(torch.ones(2), out)
        >>> out
        tensor([2., 2.])

    Based on `direct_register_custom_op` of vLLM.
    """
    check_callable("direct_register_custom_op", op_func)
    return register_custom_op(
        op_func,
        op_name=str(_full_name(op_name, target_lib, _calling_module())),
        mutates_args=mutates_args,
        fake_impl=fake_impl,
        device_types=dispatch_key,
        target_lib=target_lib,
        tags=tags,
    )


class _Options(TypedDict, total=False):
    op_name: str | None
    mutates_args: str | Iterable[str] | None
    out_shape: int | str | None
    out_dtype: torch.dtype | None
    fake_impl: Callable[..., Any] | None
    device_types: str | Sequence[str] | None
    target_lib: torch.library.Library | None
    tags: Tags
    eager: bool


@overload
def register_custom_op(fn: Function, **options: Unpack[_Options]) -> CustomOp[..., Any]: ...


@overload
def register_custom_op(
    fn: str | None = None, **options: Unpack[_Options]
) -> Callable[[Callable[..., Any]], CustomOp[..., Any]]: ...


@compilers.eager_only
def register_custom_op(
    fn: Callable[..., Any] | str | None = None,
    *,
    op_name: str | None = None,
    mutates_args: str | Iterable[str] | None = None,
    out_shape: int | str | None = None,
    out_dtype: torch.dtype | None = None,
    fake_impl: Callable[..., Any] | None = None,
    device_types: str | Sequence[str] | None = None,
    target_lib: torch.library.Library | None = None,
    tags: Tags = None,
    eager: bool = True,
) -> CustomOp[..., Any] | Callable[[Callable[..., Any]], CustomOp[..., Any]]:
    """Register an operator, with the arguments of SGLang's and TensorRT-LLM's functions.

    Use it as a decorator, or call it with the function. It takes the arguments of SGLang's
    `register_custom_op` and `register_custom_op_from_extern`, except `computed_args`. With a name
    as the first argument, it takes the arguments of TensorRT-LLM's `fast_custom_op` instead. A
    second call with equal arguments returns the existing operator.

    Args:
        fn: the function; or for a decorator, the name, as in `@register_custom_op("ns::name")`.
        op_name: the name, as in `direct_register_custom_op`. By default, the function's name.
        mutates_args: the names of the tensor arguments that the function writes to, or `"unknown"`.
        out_shape: the name or position of an argument. The result has the same shape and other
            metadata as this argument, so no fake kernel is needed.
        out_dtype: the dtype of the result, if it differs from the dtype of that argument.
        fake_impl: the fake kernel, if `out_shape` is omitted.
        device_types: device types such as `"cuda"`, or dispatch keys such as `"CUDA"`. None means
            all devices.
        target_lib: the library that owns the operator. By default the operator is permanent.
        tags: a `torch.Tag`, or several.
        eager: ignored; accepted for compatibility with SGLang. Operators are always registered
            immediately.

    Returns:
        The operator, or a decorator that returns the operator.

    Raises:
        ValueError: a name, annotation or option is invalid. Nothing is defined.
        TypeError: `fake_impl` does not accept the operator's arguments. Nothing is defined.

    Example:
        >>> import torch
        >>> from torchop.compat import register_custom_op
        >>> @register_custom_op(op_name="docs::relu_squared", out_shape="x")
        ... def relu_squared(x: torch.Tensor) -> torch.Tensor:
        ...     return x.relu() ** 2
        >>> relu_squared(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])

    Based on the functions of SGLang and TensorRT-LLM.
    """
    if isinstance(fn, str):
        if op_name is not None:
            raise OperatorNameError(
                f"register_custom_op got two names: {short_repr(fn)}, and "
                f"op_name={short_repr(op_name)}."
            )
        fn, op_name = None, fn
    package = _calling_module()

    def decorate(function: Callable[..., Any]) -> CustomOp[..., Any]:
        check_callable("register_custom_op", function)
        name = _full_name(
            getattr(function, "__name__", None) if op_name is None else op_name,
            target_lib,
            package,
        )
        if fake_impl is not None and (out_shape is not None or out_dtype is not None):
            raise RuleSignatureError(
                f"{name}: fake_impl and out_shape both describe the result. Pass only one."
            )
        if out_dtype is not None and out_shape is None:
            raise RuleSignatureError(
                f"{name}: out_dtype needs out_shape, the argument whose shape the result has."
            )
        mutated = mutates_args or ()
        registration = _Registration(
            function,
            mutated if isinstance(mutated, str) else tuple(mutated),
            _devices(name, device_types),
            fake_impl,
            # Replace an invalid `target_lib` by None here. Defining the operator rejects it anyway.
            weakref.ref(target_lib) if isinstance(target_lib, torch.library.Library) else None,
            () if tags is None else (tags,) if isinstance(tags, torch.Tag) else tuple(tags),
            out_shape,
            out_dtype,
        )
        return _register(name, registration, target_lib)

    return decorate if fn is None else decorate(fn)


def _register(
    name: OpName, registration: _Registration, library: torch.library.Library | None
) -> CustomOp[..., Any]:
    existing: CustomOp[..., Any] | None = Operator(name, "register_custom_op").handle
    if existing is not None and _registrations.get(name) == registration:
        return existing
    function, mutates_args, devices, fake_impl, _, tags, out_shape, out_dtype = registration

    def build() -> CustomOp[..., Any]:
        declaration = declare(
            name,
            function,
            users_place(),
            mutates_args=mutates_args,
            device_types=devices,
            tags=tags,
            is_lenient=True,
        )
        op: CustomOp[..., Any] = define(declaration, library).handle
        if fake_impl is not None:
            register_fake(op, fake_impl)
        elif out_shape is not None:
            register_fake(op, like=_argument(name, function, out_shape), dtype=out_dtype)
        _registrations[name] = registration
        return op

    return all_or_nothing(name, build)


def _calling_module() -> str:
    """Return the name of the module that called our caller, two frames up."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _full_name(name: object, library: torch.library.Library | None, package: str) -> OpName:
    if isinstance(name, str) and "::" not in name:
        namespace = package.partition(".")[0]
        if isinstance(library, torch.library.Library):
            namespace = library.ns
        if namespace == "__main__":
            raise OperatorNameError(
                f"{short_repr(name)} has no namespace, and the caller is a program instead of a "
                f"package. Write 'mylib::{name[:100]}', or pass target_lib."
            )
        name = f"{namespace}::{name}"
    parsed = OpName.parse_new(name)
    check_owner(parsed, library)
    return parsed


def _devices(name: OpName, keys: str | Sequence[str] | None) -> tuple[str | None, ...]:
    if keys is None:
        return (None,)
    return tuple(
        _device(name, key) if isinstance(key, str) else key
        for key in ((keys,) if isinstance(keys, str) else keys)
    )


def _device(name: OpName, key: str) -> str | None:
    if key == dispatch.kernel_key("default"):
        return None
    if dispatch.parse_dispatch_key(key) is None:
        return key  # a device type; if it is invalid, defining the operator raises an error
    device = dispatch.device_of_key(key)
    if device is None:
        raise ValueError(
            f"{name}: {short_repr(key)} is a dispatch key, but not the key of a device, such as "
            "'CUDA'. For other keys, use torchop.define and torchop.impl."
        )
    return device


def _argument(name: OpName, function: Callable[..., Any], place: object) -> str:
    parameters = list(inspect.signature(function).parameters)
    if isinstance(place, str) and place in parameters:
        return place
    if isinstance(place, int) and -len(parameters) <= place < len(parameters):
        return parameters[place]
    raise RuleSignatureError(
        f"{name}: out_shape={short_repr(place)} is neither the name nor the position of an "
        f"argument of {getattr(function, '__name__', 'the function')}, which has "
        f"{', '.join(parameters) or 'none'}."
    )
