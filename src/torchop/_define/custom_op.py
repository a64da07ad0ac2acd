from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch.library
from typing_extensions import Required, TypedDict, Unpack  # Python 3.10 lacks two of them

from torchop._compat import compilers
from torchop._core.define import define
from torchop._define.declare import declare
from torchop._define.handle import CustomOp
from torchop._errors import short_text, users_place
from torchop._rules.effect import Effect
from torchop._rules.inlining import Compile
from torchop._rules.kernels.devices import DeviceTypes
from torchop._schema.declared import Tags
from torchop._schema.naming import OpName

P = ParamSpec("P")
R = TypeVar("R")
# The default of required arguments. Because they have a default, Python does not reject a call that
# omits one, so we can raise an error that shows how to write the decorator.
MISSING: Any = object()


class TritonOptions(TypedDict, total=False):
    mutates_args: Required[str | Iterable[str]]
    schema: str | None


class Options(TritonOptions, total=False):
    device_types: DeviceTypes
    tags: Tags
    effects: Effect
    compile: Compile
    priority: Sequence[str]
    residuals: Mapping[str, Any] | None
    lib: torch.library.Library | None


@overload
def custom_op(
    name: str, fn: None = None, /, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], CustomOp[P, R]]: ...


@overload
def custom_op(name: str, fn: Callable[P, R], /, **options: Unpack[Options]) -> CustomOp[P, R]: ...


@compilers.eager_only
def custom_op(
    name: str = MISSING,
    fn: Callable[P, R] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str] = MISSING,
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    effects: Effect = None,
    compile: Compile = "opaque",
    priority: Sequence[str] = (),
    residuals: Mapping[str, Any] | None = None,
    lib: torch.library.Library | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]] | CustomOp[P, R]:
    """Turn a function into an operator. Use it as a decorator, or call it with the function.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`; the namespace is usually the name
            of your package.
        fn: the kernel, from whose annotations the schema is inferred. An argument of a structured
            type, such as a dataclass or a tuple, becomes several arguments of the schema, but the
            function still receives the object.
        mutates_args: the names of the tensor arguments that the function writes into. `()` means
            none, and `"unknown"` means that it may write into all of them.
        device_types: the device types that the function supports. None means all.
        schema: a schema such as `"(Tensor x, int n=1) -> Tensor"`, instead of the inferred one. It
            must match the annotations.
        tags: a `torch.Tag`, or several.
        effects: pass `"ordered"` or `EffectType.ORDERED` if the function has a side effect that the
            schema does not show, such as logging, so that compilers keep every call in the original
            order. Pass `"none"` if the function returns nothing and compilers may still remove
            calls to it.
        compile: pass `"inline"` to let compilers trace into the function and optimize the operators
            in it, or a mapping such as `{"inductor": "inline"}` to do so only for some backends.
            The function then also serves as the default fake kernel. Exported programs still
            contain the operator itself, and gradients still use the registered backward formula.
        priority: the names of providers (alternatives to the kernel), in the order that calls try
            them. The first provider that supports a call runs it; see `register_kernel`.
        residuals: the names and types of extra kernel results that only the backward pass uses,
            such as `{"lse": torch.Tensor}`; see `torchop.residuals`. Alternatively, annotate the
            result with `torchop.Residuals`.
        lib: the library that owns the operator. By default, the operator lives as long as the
            process.

    Returns:
        The handle of the operator, a `CustomOp`. Call it like the function.

    Raises:
        TracingError: an operator of this name was already compiled with a different effect.
        ValueError: the name, an annotation, the schema, `mutates_args`, `effects` or `compile` is
            invalid. The operator is then not defined.
        NotImplementedError: a tensor is keyword-only.
        RuntimeError: an operator with this name exists, but `custom_op` did not define it.

    Warns:
        SchemaWarning: the function neither returns nor mutates anything, and `effects` is not
            given. `torch.compile` will raise an error for calls to it.
        RedefinitionWarning: another function already defined an operator with this name. Running
            the same definition again, as in a reloaded module or a notebook cell, does not warn.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::scale", mutates_args=())
        ... def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        ...     return x * factor
        >>> scale(torch.ones(2), factor=3.0)
        tensor([3., 3.])
        >>> torch.ops.docs.scale(torch.ones(2))
        tensor([2., 2.])

    Modeled after `torch.library.custom_op`.
    """
    if name is MISSING or mutates_args is MISSING:
        raise _missing_arguments("custom_op", name)
    place = users_place()
    op_name = OpName.parse_new(name)

    @compilers.eager_only
    def decorate(function: Callable[P, R]) -> CustomOp[P, R]:
        declaration = declare(
            op_name,
            function,
            place,
            mutates_args=mutates_args,
            device_types=device_types,
            schema=schema,
            tags=tags,
            effects=effects,
            compile=compile,
            priority=priority,
            residuals=residuals,
        )
        handle: CustomOp[P, R] = define(declaration, lib).handle
        return handle

    return decorate if fn is None else decorate(fn)


def _missing_arguments(caller: str, name: object) -> TypeError:
    good = name if isinstance(name, str) else f"mylib::{getattr(name, '__name__', 'crop')}"
    return TypeError(
        f"{caller} needs the name of the operator, and mutates_args, the tensor arguments that the "
        f'function writes into. Write @torchop.{caller}("{short_text(good)}", mutates_args=()) if '
        'it writes into none, and mutates_args=("x",) if it writes into x.'
    )


@overload
def triton_op(
    name: str, fn: None = None, /, **options: Unpack[TritonOptions]
) -> Callable[[Callable[P, R]], CustomOp[P, R]]: ...


@overload
def triton_op(
    name: str, fn: Callable[P, R], /, **options: Unpack[TritonOptions]
) -> CustomOp[P, R]: ...


@compilers.eager_only
def triton_op(
    name: str = MISSING,
    fn: Callable[P, R] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str] = MISSING,
    schema: str | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]] | CustomOp[P, R]:
    """Turn a function that launches Triton kernels into an operator.

    `torch.compile` traces into the function, so Inductor can optimize the kernels together with the
    code around the call. Exported programs contain the operator itself.

    Inside the function, launch kernels with `wrap_triton(kernel)[grid](...)`, so that compilers can
    trace the launches. Eager calls launch the kernels directly.

    If you register a different kernel for some devices, such as the CPU, compiled programs call it
    on these devices. In this case, the operator needs a fake kernel to work on machines without
    Triton.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`.
        fn: a function that calls Triton kernels and PyTorch operators. It is the kernel for all
            devices, and the default fake kernel.
        mutates_args: the names of the tensor arguments that the function writes into. `()` means
            none, and `"unknown"` means that it may write into all of them.
        schema: a schema instead of the inferred one, as in `custom_op`.

    Returns:
        The handle of the operator, a `CustomOp`.

    Raises:
        ValueError: see `custom_op`.

    Example:
        >>> import torch, torchop
        >>> @torchop.triton_op("docs::add_one", mutates_args=())
        ... def add_one(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1  # or torchop.wrap_triton(kernel)[grid](x, ...)
        >>> add_one(torch.zeros(2))
        tensor([1., 1.])

    Modeled after `torch.library.triton_op`.
    """
    if name is MISSING or mutates_args is MISSING:
        raise _missing_arguments("triton_op", name)
    place = users_place()
    op_name = OpName.parse_new(name)

    @compilers.eager_only
    def decorate(function: Callable[P, R]) -> CustomOp[P, R]:
        # Find the Triton kernels before defining the operator. The search calls into PyTorch, which
        # may raise an error, so there must be nothing to undo yet.
        kernels = compilers.triton_kernels(function)
        declaration = declare(
            op_name, function, place, mutates_args=mutates_args, schema=schema, launches=True
        )
        handle: CustomOp[P, R] = define(declaration).handle
        compilers.note_triton_kernels(handle.name, kernels)
        return handle

    return decorate if fn is None else decorate(fn)
