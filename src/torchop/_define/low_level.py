from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, overload

import torch.library

from torchop._compat import compilers, dispatch
from torchop._compat.classes import Tag
from torchop._core.library import process_library
from torchop._core.registry import OpLike, check_library, op_name
from torchop._define.library import (
    Library,
    checked_kernel,
    define_in,
    local_name,
)
from torchop._errors import SchemaError, short_repr, short_text, warn
from torchop._schema.callables import Decorator, Function, Lambda, decorator_or_call
from torchop._schema.naming import OpName

_NAMELESS = re.compile(r"\(.*\) -> .*")


@overload
def define(
    qualname: str,
    schema: str,
    alias_analysis: str = "",
    *,
    lib: torch.library.Library | None = None,
    tags: Tag | Iterable[Tag] = (),
) -> None: ...


@overload
def define(qualname: torch.library.Library, schema: str, alias_analysis: str = "") -> Decorator: ...


@compilers.eager_only
def define(
    qualname: str | torch.library.Library,
    schema: str,
    alias_analysis: str = "",
    *,
    lib: torch.library.Library | None = None,
    tags: Tag | Iterable[Tag] = (),
) -> Decorator | None:
    """Define an operator from a schema, without a kernel.

    This also supports PyTorch's older form: `define(library, "name(Tensor x) -> Tensor")` returns a
    decorator that registers a function as the kernel for all devices and for autograd.

    Args:
        qualname: the name of the operator: `"namespace::name"` or `"namespace::name.overload"`. In
            the older form, the library.
        schema: the arguments and results without the operator's name, such as `"(Tensor x) ->
            Tensor"`.
        alias_analysis: only for the older form; see `torchop.Library.define`.
        lib: the library that owns the operator. By default, the operator lives as long as the
            process.
        tags: a `torch.Tag`, or several.

    Raises:
        ValueError: `qualname` or `schema` does not have the required form.
        RuntimeError: the schema does not parse, or the operator exists.

    Example:
        >>> import torch, torchop
        >>> torchop.define("docs::times_two", "(Tensor x) -> Tensor")
        >>> @torchop.impl("docs::times_two", "cpu")
        ... def _(x):
        ...     return x * 2
        >>> torch.ops.docs.times_two(torch.ones(1))
        tensor([2.])

    Modeled after `torch.library.define`.
    """
    if isinstance(qualname, torch.library.Library):
        library = qualname

        def define_and_implement(function: Callable[..., Any]) -> None:
            _implement_in(library, _define_in(library, schema, alias_analysis), function, "")

        return decorator_or_call(define_and_implement, None)
    if not isinstance(qualname, str):
        raise ValueError(
            f"define(qualname, schema): expected qualname to be a str such as 'mylib::crop', got "
            f"{type(qualname).__name__}."
        )
    if not isinstance(schema, str):
        raise TypeError(
            f"define({short_repr(qualname)}, schema): expected a str, got {short_repr(schema)}."
        )
    library, name = _library_for(qualname, "define", lib)
    if not _NAMELESS.fullmatch(schema):
        raise SchemaError(
            f'define({short_repr(qualname)}, schema): expected schema to look like "(Tensor x) '
            f'-> Tensor", without the name of the operator; got {short_repr(schema)}.'
        )
    _define_in(library, name.local + schema, "", tags)
    return None


@overload
def impl(
    qualname: OpLike,
    types: str | Sequence[str],
    func: Function | Lambda | None = None,
    *,
    lib: torch.library.Library | None = None,
) -> Function: ...


@overload
def impl(
    qualname: torch.library.Library, types: str, func: str | None = None, dispatch_key: str = ""
) -> Decorator: ...


@compilers.eager_only
def impl(
    qualname: OpLike | torch.library.Library,
    types: str | Sequence[str],
    func: Function | Lambda | str | None = None,
    dispatch_key: str = "",
    *,
    lib: torch.library.Library | None = None,
) -> Function | Decorator:
    """Register a kernel for an operator that is defined with `define` or in C++.

    You may register the kernel before the operator is defined. PyTorch's older form also works:
    `impl(library, name, dispatch_key)` returns a decorator.

    Args:
        qualname: the operator.
        types: a device type such as `"cpu"`, a dispatch key such as `"Autograd"`, or a sequence of
            these. `"default"` means all devices.
        func: the kernel. Omit it to use `impl` as a decorator.
        dispatch_key: only for the older form.
        lib: the library that owns the registration. By default, the registration is permanent.

    Returns:
        `func`.

    Raises:
        RuntimeError: the device type or dispatch key is unknown.
        TypeError: `func` is not callable, or an item of `types` is not a str.

    Example: see `torchop.define`.

    Modeled after `torch.library.impl`.
    """
    if isinstance(qualname, torch.library.Library):
        library, name = qualname, cast(OpLike, types)
        key = cast(str, dispatch_key if func is None else func)
        return decorator_or_call(lambda function: _implement_in(library, name, function, key), None)
    kinds = [types] if isinstance(types, str) or not isinstance(types, Iterable) else types
    keys = [_key_of_kernel(qualname, kind) for kind in kinds]
    library, op = _library_for(str(op_name(qualname, "impl")), "impl", lib)

    def register(function: Callable[..., Any]) -> None:
        for key in dict.fromkeys(keys):
            _implement_in(library, op.local, function, key)

    return decorator_or_call(register, cast("Function | Lambda | None", func))


def _key_of_kernel(op: OpLike, kind: object) -> str:
    if not isinstance(kind, str):
        raise TypeError(
            f"impl({short_text(op)}): expected device types or dispatch keys as strings, such as "
            f"'cpu' or 'Autograd'; got {short_repr(kind)} of type {type(kind).__name__}."
        )
    return dispatch.kernel_key(kind)


# Users may pass a plain `torch.library.Library`. For such a library, the functions below add two
# features of `torchop.Library`: the results of kernels are checked, and calls raise an error once
# the library is closed.


def _define_in(
    library: torch.library.Library, schema: str, alias_analysis: str, tags: Any = ()
) -> str:
    if isinstance(library, Library):
        return library.define(schema, alias_analysis, tags=tags)
    define = functools.partial(library.define, schema, alias_analysis, tags=tags)
    return define_in(library, schema, define)


def _implement_in(
    library: torch.library.Library, op: OpLike, function: Callable[..., Any], key: str
) -> None:
    if not isinstance(library, Library) and callable(function):
        function = checked_kernel(f"{library.ns}::{local_name(library, op)}", function, False)
    library.impl(op, function, key)


def _library_for(
    qualname: str, caller: str, lib: torch.library.Library | None
) -> tuple[torch.library.Library, OpName]:
    name = OpName.parse(qualname)
    check_library(f"{caller}({name})", lib)
    if lib is None:
        return process_library(name.namespace), name
    if lib.ns != name.namespace:
        warn(
            f"{caller}({short_repr(qualname)}): lib is a library of the namespace {lib.ns!r}, "
            f"so the operator is {lib.ns}::{name.local}.",
            UserWarning,
        )
    return lib, name
