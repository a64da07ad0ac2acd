"""Library: operators and kernels with one lifetime, and checks of what its kernels return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch.library
from typing_extensions import Self

from torchop._compat import (
    compilers,
    deregistration,
    dispatch,
    inductor_writes,
    libraries,
    operators,
    registries,
    torch_ops,
)
from torchop._compat.classes import OpOverload, Tag
from torchop._core import library as core_library
from torchop._core.checking import checked, recompile_for_checking
from torchop._core.contract import ResultCheck, result_check
from torchop._core.library import OwnLibrary
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, already_defined, find_schema, op_name
from torchop._errors import (
    OperatorGoneError,
    OperatorNameError,
    short_errors,
    short_repr,
    short_text,
    users_place,
)
from torchop._native.table.calls import attach, outdate
from torchop._native.table.ours import KERNEL_ATTRIBUTE
from torchop._schema.naming import OpName

fallthrough_kernel = torch.library.fallthrough_kernel

_KINDS = ("DEF", "IMPL", "FRAGMENT")


class Library(OwnLibrary):
    """Operators and kernels with one lifetime: closing the library removes all of them.

    A library is also a context manager. Closing it removes everything that was registered through
    it, so that a call of one of its operators is an error, instead of reading freed memory.

    Args:
        ns: the namespace.
        kind: `"DEF"` for the one library that defines a namespace, `"FRAGMENT"` for one of several,
            `"IMPL"` for one that only implements operators that exist.
        dispatch_key: with the kind `"IMPL"`, the key that `impl` registers to if it names none.

    Raises:
        ValueError: a kind or a namespace that PyTorch does not have.
        RuntimeError: PyTorch does not have the dispatch key, or the namespace has a `"DEF"` library
            already.

    Example:
        >>> import torch, torchop
        >>> with torchop.Library("docs_low", "FRAGMENT") as library:
        ...     name = library.define("add_one(Tensor x) -> Tensor")
        ...     library.impl("add_one", lambda x: x + 1, "CPU")
        ...     torch.ops.docs_low.add_one(torch.ones(1))
        tensor([2.])

    The idea is `torch.library.Library`.
    """

    # Checked before __init__, which is PyTorch's own: it reads the frame of whoever called it, to
    # say in its errors where a library was made, and that must stay the user's.
    def __new__(cls, ns: str, kind: str, dispatch_key: str = "") -> Self:
        if kind not in _KINDS:
            raise ValueError(
                f"Unsupported kind: {short_repr(kind)}; a library is one of {', '.join(_KINDS)}."
            )
        if not isinstance(ns, str) or ns.strip() != ns or ns == "" or ":" in ns:
            raise OperatorNameError(
                f"a library needs the name of a namespace, got {short_repr(ns)}."
            )
        if ns == "prim" and kind != "IMPL":
            raise OperatorNameError(
                "'prim' is the reserved namespace of TorchScript; use the name of your package."
            )
        if dispatch_key and dispatch.parse_dispatch_key(dispatch_key) is None:
            raise RuntimeError(
                f"{short_repr(dispatch_key)} is not a dispatch key; they are written like 'CPU', "
                "'CUDA', 'Meta' or 'Autograd'."
            )
        if dispatch_key and kind != "IMPL":
            raise ValueError(
                f"dispatch_key={short_repr(dispatch_key)} is for libraries of the kind 'IMPL' "
                f"only; in a library of the kind {short_repr(kind)}, name the key in each call of "
                "impl."
            )
        return super().__new__(cls)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes everything that was registered through this library. It can be called again."""
        self._destroy()

    def define(
        self, schema: str, alias_analysis: str = "", *, tags: Tag | Iterable[Tag] = ()
    ) -> str:
        """Defines an operator by its schema.

        Args:
            schema: such as `"add.Tensor(Tensor self, Tensor other) -> Tensor"`. The name may carry
                the namespace of this library.
            alias_analysis: `""` or `"FROM_SCHEMA"` if the schema says which arguments alias,
                `"CONSERVATIVE"` if any of them may.
            tags: a `torch.Tag`, or several.

        Returns:
            The name of the operator, without its overload.

        Raises:
            RuntimeError: the schema does not parse, the operator exists, or its namespace is not
                that of the library.
            OperatorGoneError: this library is closed.
        """
        self._check_open()
        if not isinstance(schema, str):
            raise TypeError(f"define expects a schema as a str, got {type(schema).__name__}.")
        tags = (tags,) if isinstance(tags, Tag) else tuple(tags)
        # PyTorch accepts the namespace in the name, but some releases then forget to clean it up.
        schema = schema.removeprefix(f"{self.ns}::")
        define = functools.partial(super().define, schema, alias_analysis, tags=tags)
        with short_errors:
            name = define_in(self, schema, define)
        return name.removeprefix(f"{self.ns}::")

    def impl(
        self,
        op_name: OpLike,
        fn: Callable[..., Any],
        dispatch_key: str = "",
        *,
        with_keyset: bool = False,
        allow_override: bool = True,
    ) -> None:
        """Registers a kernel for an operator, yours or PyTorch's, at a dispatch key.

        The number and types of what the kernel returns are checked against the schema.

        Args:
            op_name: the operator, by name (with or without the namespace) or as an object.
            fn: the kernel, or `fallthrough_kernel` to pass on to the next key.
            dispatch_key: such as `"CPU"`, `"Meta"` or `"Autograd"`; by default that of the library.
            with_keyset: whether the kernel gets the `DispatchKeySet` of the call as its first
                argument, to redispatch.
            allow_override: whether to replace another kernel at this key.

        Raises:
            TypeError: `fn` is not callable, or `dispatch_key` is not a str.
            RuntimeError: an unknown dispatch key, or a kernel that may not be replaced.
            OperatorGoneError: this library is closed.
        """
        self._check_open()
        name = local_name(self, op_name)
        if not callable(fn):
            raise TypeError(
                f"impl({short_text(name)}): Input function is required to be a callable; got "
                f"{short_repr(fn)} of type {type(fn).__name__}."
            )
        if not isinstance(dispatch_key, str):
            raise TypeError(
                f"impl({short_text(name)}): the dispatch key is a str, such as 'CPU'; got "
                f"{short_repr(dispatch_key)} of type {type(dispatch_key).__name__}."
            )
        kernel = checked_kernel(f"{self.ns}::{name}", fn, with_keyset)
        with registration_lock, short_errors, libraries.calls_held([f"{self.ns}::{name}"]):
            super().impl(  # type: ignore[no-untyped-call]
                name,
                kernel,
                dispatch_key,
                with_keyset=with_keyset,
                allow_override=allow_override,
            )
            libraries.follow(self)

    def fallback(
        self, fn: Callable[..., Any], dispatch_key: str = "", *, with_keyset: bool = False
    ) -> None:
        """Registers a kernel for all operators that have none at a dispatch key.

        Args:
            fn: the kernel, which gets the `OpOverload` before the arguments; or
                `fallthrough_kernel`.
            dispatch_key: the key; by default that of the library.
            with_keyset: whether the kernel gets the `DispatchKeySet` of the call as its first
                argument.

        Raises:
            RuntimeError: the namespace of this library is not `"_"`, which stands for all
                namespaces.
            TypeError: `fn` is not callable.
            ValueError: neither this call nor the library has a dispatch key.
            OperatorGoneError: this library is closed.
        """
        self._check_open()
        if not callable(fn):
            raise TypeError(
                f"fallback expects a function, got {short_repr(fn)} of type {type(fn).__name__}."
            )
        key = dispatch_key or self.dispatch_key
        if not key and self.ns == "_":
            raise ValueError("fallback needs a dispatch key, such as 'Autocast'.")
        kernel = fn if fn is fallthrough_kernel else checked_fallback(fn, with_keyset)
        with registration_lock:
            super().fallback(  # type: ignore[no-untyped-call]
                kernel, key, with_keyset=with_keyset
            )

    def _check_open(self) -> None:
        if self.m is None:
            raise OperatorGoneError(
                f"the Library object of namespace {self.ns!r} has been destroyed: nothing can be "
                "registered through it any more."
            )


def define_in(library: torch.library.Library, schema: str, define: Callable[[], str]) -> str:
    """Has an operator defined in a library, and ended with it; returns what `define` returns."""
    # Not checked: `define` refuses what is no schema.
    local = schema.partition("(")[0].strip().removeprefix(f"{library.ns}::")
    packet, _, overload = local.partition(".")
    name = OpName(library.ns, packet, overload)

    def follow() -> None:
        library._op_defs.add(str(name))
        core_library.record_place(library, name)
        deregistration.after_definition(*name)
        libraries.follow(library)
        if "!" in schema:
            inductor_writes.register_lowerings(str(name))
        if "__torch__" in schema:  # a TorchScript class
            registries.set_default_effect(str(name))

    with registration_lock:
        if operators.is_registered(name.packet, overload):
            place = users_place()
            raise already_defined(name, f"{place.file}:{place.line}")
        deregistration.before_definition(*name)
        result = define()
        follow()
    return result


def local_name(library: torch.library.Library, op: OpLike) -> str:
    """The name of an operator as a library writes it, to implement it."""
    if isinstance(op, str) and "::" not in op:
        return op
    name = op_name(op, "impl")
    if name.namespace != library.ns and library.ns != "_":
        raise RuntimeError(
            f"impl({name}): the operator name does not match namespace {library.ns!r} of the "
            f"library. Use a library of {name.namespace!r}."
        )
    return name.local


core_library.process_library_type = Library


def checked_kernel(
    qualname: str, function: Callable[..., Any], with_keyset: bool
) -> Callable[..., Any]:
    """Checks what a kernel returns, before PyTorch trusts it to match the schema."""
    if function is fallthrough_kernel:
        return function
    name = OpName.parse(qualname)
    check: ResultCheck | None = None
    checked_schema: Any = None  # as PyTorch has it; an overload may go to the next operator
    run = function

    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal check, checked_schema, run
        # A kernel may be registered before the operator is defined, and outlive that definition.
        current = torch_ops.existing_overload(*name) or torch_ops.live_overload(*name)
        current_schema = getattr(current, "_schema", None)
        check_now = check
        if check_now is None or current is None or current_schema is not checked_schema:
            schema = find_schema(name)
            with registration_lock:
                run = checked(qualname, schema, function, leading=int(with_keyset))
                check_now = result_check(schema.returns)
                if current is not None:
                    attach(name, current)
                # Last, because a thread that sees the new check must not run the old kernel.
                check, checked_schema = check_now, current_schema
        if dispatch.is_handled_by_mode() and not with_keyset:  # one with a keyset redispatches
            with dispatch.with_transforms():
                return check_now(run(*args, **kwargs), qualname)
        return check_now(run(*args, **kwargs), qualname)

    def outdate_plan() -> None:
        nonlocal check
        check = None
        outdate(name)

    vars(kernel)["outdate_plan"] = outdate_plan
    recompile_for_checking(cast(Any, kernel))
    if not with_keyset:
        vars(kernel)[KERNEL_ATTRIBUTE] = function
    return kernel


def checked_fallback(function: Callable[..., Any], with_keyset: bool) -> Callable[..., Any]:
    """The same for a fallback: the kernel of every operator that has no kernel of its own."""

    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op: OpOverload = args[1 if with_keyset else 0]
        check = result_check(tuple(str(result.real_type) for result in op._schema.returns))
        return check(function(*args, **kwargs), op._name, "fallback")

    return kernel
