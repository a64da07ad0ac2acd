"""custom_op and triton_op: turn a function into an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch.library
from typing_extensions import Required, TypedDict, Unpack  # Python 3.10 lacks two of them

from torchop._compat import compilers
from torchop._define.declare import declare, define_operator, new_name
from torchop._define.handle import CustomOp
from torchop._errors import short_text, users_place
from torchop._rules.effect import Effect
from torchop._rules.inlining import Compile
from torchop._rules.kernels.devices import DeviceTypes
from torchop._schema.declared import Tags

P = ParamSpec("P")
R = TypeVar("R")
# The default of required arguments, so that an error can explain a missing one.
MISSING: Any = object()


class TritonOptions(TypedDict, total=False):
    """What `triton_op` takes by keyword, for type checkers."""

    mutates_args: Required[str | Iterable[str]]
    schema: str | None


class Options(TritonOptions, total=False):
    """What `custom_op` takes by keyword, for type checkers."""

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
    """Turns a function into an operator, as a decorator or as a call.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`; the namespace is usually the name
            of your package.
        fn: the function, which is the kernel, and whose annotations give the schema. Types that a
            schema does not have, such as a dataclass, an Enum or a tuple, become several arguments
            of the schema, and the function gets the objects.
        mutates_args: the names of the tensor arguments that the function writes into, or
            `"unknown"` for all of them; `()` for a function that writes into none.
        device_types: for which device types the function is the kernel; None for all.
        schema: a schema such as `"(Tensor x, int n=1) -> Tensor"`, instead of the annotations, with
            which it is compared.
        tags: a `torch.Tag`, or several.
        effects: `"ordered"`, or `EffectType.ORDERED`, if the function does something that the
            schema does not show, such as logging. Compilers then keep every call, and keep the
            calls in order. `"none"` if the function returns nothing and compilers may remove its
            calls. None declares neither.
        compile: `"inline"` if compilers may trace the function and optimize the operators in it.
            A mapping such as `{"inductor": "inline"}` chooses the backends. The function is then
            also the fake kernel, until you register another one. Exported programs still hold the
            operator, and gradients use the registered formula.
        priority: the order in which calls ask providers, by name. Their kernels, which you register
            later (see `register_kernel`), run in place of the function where they can.
        residuals: the types of what kernels return for the backward alone, by their names, such as
            `{"lse": torch.Tensor}`; see `torchop.residuals`. `torchop.Residuals` declares them in
            the annotation of the result instead.
        lib: the library that the operator lives in; by default it lives as long as the process.

    Returns:
        The handle, which is called and treated like the function.

    Raises:
        TracingError: the operator was already compiled with another effect.
        ValueError: a name, an annotation, a schema, `mutates_args`, `effects` or `compile` that
            breaks a rule. Nothing stays defined.
        NotImplementedError: a keyword-only tensor.
        RuntimeError: the operator exists already, defined by other means than `custom_op`.

    Warns:
        SchemaWarning: the function returns nothing and mutates nothing, and `effects` is not
            given. `torch.compile` will raise an error.
        RedefinitionWarning: the operator was defined before by another function. The new
            definition replaces it; the same function, in a reloaded module or a notebook cell,
            replaces its own definition without a warning.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::scale", mutates_args=())
        ... def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        ...     return x * factor
        >>> scale(torch.ones(2), factor=3.0)
        tensor([3., 3.])
        >>> torch.ops.docs.scale(torch.ones(2))
        tensor([2., 2.])

    The idea is `torch.library.custom_op`.
    """
    if name is MISSING or mutates_args is MISSING:
        raise _missing_arguments("custom_op", name)
    place = users_place()
    op_name = new_name(name, lib)

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
            residuals=residuals,
        )
        handle: CustomOp[P, R] = define_operator(declaration, lib, priority)
        return handle

    return decorate if fn is None else decorate(fn)


def _missing_arguments(caller: str, name: object) -> TypeError:
    """Return the error for a call without required arguments, such as a bare decorator."""
    good = name if isinstance(name, str) else f"mylib::{getattr(name, '__name__', 'crop')}"
    return TypeError(
        f"{caller} takes the name of the operator, and mutates_args, the tensor arguments that the "
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


def triton_op(
    name: str = MISSING,
    fn: Callable[P, R] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str] = MISSING,
    schema: str | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]] | CustomOp[P, R]:
    """Turns a function that launches Triton kernels into an operator.

    It is `custom_op(..., compile="inline")` for such functions: `torch.compile` traces the
    function, so that Inductor sees the kernels and the code around them, while exported programs
    hold the operator. Wrap each kernel in the function, `wrap_triton(kernel)[grid](...)`, so that
    compilers can trace it; without a compiler, the wrapped kernel is launched directly. On a device
    for which you register a kernel, such as the CPU, compiled programs call that kernel; they need
    a fake kernel where Triton is not installed.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`.
        fn: the function, of Triton kernels and PyTorch's operators. It is the kernel for all
            devices and the fake kernel.
        mutates_args: the names of the tensor arguments that the function writes into, or
            `"unknown"` for all of them.
        schema: a schema instead of the annotations, as in `custom_op`.

    Returns:
        The handle, a `CustomOp` with all its registrations.

    Raises:
        ValueError: as `custom_op`.

    Example:
        >>> import torch, torchop
        >>> @torchop.triton_op("docs::add_one", mutates_args=())
        ... def add_one(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1  # or torchop.wrap_triton(kernel)[grid](x, ...)
        >>> add_one(torch.zeros(2))
        tensor([1., 1.])

    The idea is `torch.library.triton_op`.
    """
    if name is MISSING or mutates_args is MISSING:
        raise _missing_arguments("triton_op", name)
    place = users_place()
    op_name = new_name(name, None)

    def decorate(function: Callable[P, R]) -> CustomOp[P, R]:
        # First: it runs code of PyTorch's that may fail.
        kernels = compilers.triton_kernels(function)
        declaration = declare(
            op_name, function, place, mutates_args=mutates_args, schema=schema, launches=True
        )
        handle: CustomOp[P, R] = define_operator(declaration, None)
        compilers.note_triton_kernels(handle.name, kernels)
        return handle

    return decorate if fn is None else decorate(fn)
