from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch.library
from typing_extensions import Self

from torchop import _hooks
from torchop._compat import (
    compilers,
    dispatch,
    inductor_writes,
    libraries,
    operators,
    registries,
    schemas,
    torch_ops,
)
from torchop._compat.classes import EffectType, OpOverload, Tag
from torchop._core import library as core_library
from torchop._core.checking import checked, recompile_for_checking
from torchop._core.contract import ResultCheck, result_check
from torchop._core.library import OwnLibrary
from torchop._core.lock import registration_lock, run_waiting_hooks
from torchop._core.registered import DEFINITION, registrations_of
from torchop._core.registry import OpLike, already_defined, find_schema, op_name
from torchop._errors import (
    OperatorGoneError,
    OperatorNameError,
    SchemaWarning,
    short_errors,
    short_repr,
    short_text,
    users_place,
    warn,
)
from torchop._native.table.calls import attach, outdate
from torchop._native.table.ours import KERNEL_ATTRIBUTE
from torchop._rules.effect import may_change_objects
from torchop._rules.functionalization import rule as functionalization
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

fallthrough_kernel = torch.library.fallthrough_kernel

_KINDS = ("DEF", "IMPL", "FRAGMENT")


class Library(OwnLibrary):
    """A collection of operators and kernels. Closing the library deregisters all of them.

    You can use a library as a context manager, which closes it on exit. Calling an operator of a
    closed library raises an error.

    Args:
        ns: the namespace.
        kind: `"FRAGMENT"` to define operators and register kernels, `"IMPL"` to only register
            kernels, or `"DEF"` for the main library of a namespace. A namespace can have only one
            main library.
        dispatch_key: the default dispatch key of `impl`, for libraries of kind `"IMPL"`.

    Raises:
        ValueError: the kind or the namespace is invalid.
        RuntimeError: the dispatch key is unknown, or the namespace already has a `"DEF"` library.

    Example:
        >>> import torch, torchop
        >>> with torchop.Library("docs_low", "FRAGMENT") as library:
        ...     name = library.define("add_one(Tensor x) -> Tensor")
        ...     library.impl("add_one", lambda x: x + 1, "CPU")
        ...     torch.ops.docs_low.add_one(torch.ones(1))
        tensor([2.])

    Modeled after `torch.library.Library`.
    """

    # Check the arguments in __new__, because PyTorch's __init__ records the line of its caller.
    # If we defined __init__, PyTorch would record our line instead of the user's.
    def __new__(cls, ns: str, kind: str, dispatch_key: str = "") -> Self:
        if kind not in _KINDS:
            raise ValueError(
                f"Unsupported kind: {short_repr(kind)}; expected one of {', '.join(_KINDS)}."
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
                f"{short_repr(dispatch_key)} is not a dispatch key; pass a key such as 'CPU', "
                "'CUDA', 'Meta' or 'Autograd'."
            )
        if dispatch_key and kind != "IMPL":
            raise ValueError(
                f"dispatch_key={short_repr(dispatch_key)} is only allowed for libraries of the "
                f"kind 'IMPL'; in a library of the kind {short_repr(kind)}, pass the key to each "
                "call of impl."
            )
        return super().__new__(cls)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @compilers.eager_only
    def close(self) -> None:
        """Deregister everything that was registered through this library."""
        self._destroy()

    @compilers.eager_only
    def define(
        self, schema: str, alias_analysis: str = "", *, tags: Tag | Iterable[Tag] = ()
    ) -> str:
        """Define an operator from a schema.

        Args:
            schema: a schema with the name of the operator, such as `"add.Tensor(Tensor self, Tensor
                other) -> Tensor"`. The name may include the namespace of this library.
            alias_analysis: `""` or `"FROM_SCHEMA"` if the schema declares all aliasing;
                `"CONSERVATIVE"` if results may alias any argument.
            tags: a `torch.Tag`, or several.

        Returns:
            The name of the operator, without the overload.

        Raises:
            RuntimeError: the schema does not parse, the operator exists, or the schema names
                another namespace.
            OperatorGoneError: this library is closed.
        """
        self._check_open()
        if not isinstance(schema, str):
            raise TypeError(f"define expects a schema as a str, got {type(schema).__name__}.")
        tags = (tags,) if isinstance(tags, Tag) else tuple(tags)
        # Remove the namespace from the schema. Otherwise, PyTorch's `define` would record the name
        # as "ns::ns::name", and `_destroy` would fail in _clear_torch_ops_cache (torch/library.py).
        schema = schema.removeprefix(f"{self.ns}::")
        define = functools.partial(super().define, schema, alias_analysis, tags=tags)
        with short_errors:
            name = define_in(self, schema, define)
        return name.removeprefix(f"{self.ns}::")

    @compilers.eager_only
    def impl(
        self,
        op_name: OpLike,
        fn: Callable[..., Any],
        dispatch_key: str = "",
        *,
        with_keyset: bool = False,
        allow_override: bool = True,
    ) -> None:
        """Register a kernel for a dispatch key of any operator, including PyTorch's own.

        Each call then checks the number and types of the kernel's results against the schema.

        Args:
            op_name: the operator, by name (with or without the namespace) or as an object.
            fn: the kernel, or `fallthrough_kernel` to skip this key.
            dispatch_key: a dispatch key such as `"CPU"`, `"Meta"` or `"Autograd"`. The default is
                the library's key.
            with_keyset: whether the kernel receives the call's `DispatchKeySet` as an additional
                first argument, so that it can redispatch the call.
            allow_override: whether to replace an existing kernel for this key.

        Raises:
            TypeError: `fn` is not callable, or `dispatch_key` is not a str.
            RuntimeError: the dispatch key is unknown, or a kernel exists and `allow_override` is
                False.
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
                f"impl({short_text(name)}): the dispatch key must be a str, such as 'CPU'; got "
                f"{short_repr(dispatch_key)} of type {type(dispatch_key).__name__}."
            )
        kernel = checked_kernel(f"{self.ns}::{name}", fn, with_keyset)
        # A kernel without any key is a decomposition into other operators.
        key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
        with (
            registrations_of(self, f"{self.ns}::{name}").registering(f"kernel at {key}"),
            registration_lock,
            short_errors,
        ):
            super().impl(  # type: ignore[no-untyped-call]
                name,
                kernel,
                dispatch_key,
                with_keyset=with_keyset,
                allow_override=allow_override,
            )
            libraries.follow(self)

    @compilers.eager_only
    def fallback(
        self, fn: Callable[..., Any], dispatch_key: str = "", *, with_keyset: bool = False
    ) -> None:
        """Register a fallback for all operators without a kernel for this dispatch key.

        Args:
            fn: the fallback, or `fallthrough_kernel`. It receives the `OpOverload`, followed by the
                arguments of the call.
            dispatch_key: the dispatch key. The default is the library's key.
            with_keyset: whether the fallback receives the call's `DispatchKeySet` as an additional
                first argument.

        Raises:
            RuntimeError: the namespace of this library is not `"_"` (all namespaces).
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
                f"the Library object of namespace {self.ns!r} has been destroyed, so it cannot "
                "register anything. Create a new Library."
            )


def define_in(library: torch.library.Library, schema: str, define: Callable[[], str]) -> str:
    """Define an operator in a library of torchop or PyTorch.

    `define` is the function that defines the operator in the dispatcher. It checks the schema and
    returns the operator's name.
    """
    local = schema.partition("(")[0].strip().removeprefix(f"{library.ns}::")
    packet, _, overload = local.partition(".")
    name = OpName(library.ns, packet, overload)

    def follow() -> None:
        library._op_defs.add(str(name))
        registered = registrations_of(library, name)
        registered.record_place(DEFINITION, users_place())
        torch_ops.after_definition(*name)
        libraries.follow(library)
        functionalization.install_low_level(registered, is_mutable="!" in schema)
        if "__torch__" in schema:  # a TorchScript class
            registries.set_default_effect(str(name))
        elif "." in schema and may_change_objects(_schema_of(name, schema)):
            remove = registries.register_effect(str(name), EffectType.ORDERED)
            registered.add("effect", None, remove)

    run_waiting_hooks()
    with registration_lock:
        if operators.is_registered(name.packet, overload):
            place = users_place()
            raise already_defined(name, f"{place.file}:{place.line}")
        torch_ops.before_definition(*name)
        result = define()
        follow()
    if "!" in schema:
        inductor_writes.register_lowerings(str(name))  # not under the lock, because it may import
    if "]?" in schema or "][" in schema:
        _warn_of_ignored_tensors(_schema_of(name, schema))
    return result


def _warn_of_ignored_tensors(schema: Schema) -> None:
    # `DispatchKeyExtractor` (aten/src/ATen/core/dispatch/DispatchKeyExtractor.h) skips these types.
    for argument in schema.arguments:
        if argument.holds_tensors and argument.kind.startswith(("Optional[List[", "List[List[")):
            warn(
                f"{schema.name}: the dispatcher ignores the tensors in the argument "
                f"{argument.name!r}, so it may select the wrong kernel or none, and they get no "
                "gradients. Define the operator with custom_op, or use the type Tensor?[], in "
                "which the list may be empty.",
                SchemaWarning,
            )


def _schema_of(name: OpName, written: str) -> Schema:
    arguments = written[written.index("(") :]
    return Schema(schemas.parse(f"{name}{arguments}"), written)


def local_name(library: torch.library.Library, op: OpLike) -> str:
    """Return an operator's name without the namespace, as `Library.impl` expects it."""
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
    """Wrap a kernel to check its results against the schema, which PyTorch does not check."""
    if function is fallthrough_kernel:
        return function
    name = OpName.parse(qualname)
    check: ResultCheck | None = None
    checked_schema: Any = None  # the FunctionSchema for which `check` was created
    run = function

    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal check, checked_schema, run
        # Look up the operator in every call, because it may be defined or redefined after its
        # kernel is registered.
        current = torch_ops.existing_overload(*name) or torch_ops.live_overload(*name)
        current_schema = getattr(current, "_schema", None)
        check_now = check
        if check_now is None or current is None or current_schema is not checked_schema:
            schema = find_schema(name)
            if current is not None:
                attach(name, current)
            with registration_lock:  # see `checked`
                run = checked(qualname, schema, function, leading=int(with_keyset))
                check_now = result_check(schema.returns)
                # Set `run` before `check`. Other threads read the two in the opposite order, so no
                # thread combines the new `check` with the old `run`.
                check, checked_schema = check_now, current_schema
        if _hooks.count_call is not None:
            _hooks.count_call()
        # A kernel that receives the keyset redispatches the call itself, so it must run with the
        # dispatcher's state unchanged.
        if dispatch.is_handled_by_mode() and not with_keyset:
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
    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op: OpOverload = args[1 if with_keyset else 0]
        check = result_check(tuple(str(result.real_type) for result in op._schema.returns))
        return check(function(*args, **kwargs), op._name, "fallback")

    return kernel
