"""The low level: libraries, schemas, and kernels by dispatch key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

import torch.library

from torchop import _naming
from torchop._checking import checked, follow
from torchop._compat import compilers, dispatch, libraries, retirement, torch_ops
from torchop._compat.classes import DispatchKey, DispatchKeySet, OpOverload, Tag
from torchop._contract import ResultCheck, result_check
from torchop._errors import OperatorGoneError, OperatorNameError, SchemaError
from torchop._naming import OpName
from torchop._native import low_level
from torchop._plan import registration_lock
from torchop._resolve import OpLike, find_schema, op_name, own_definition
from torchop._rules._shapes import Function, decorator_or_call
from torchop._warn import warn

if TYPE_CHECKING:
    from typing_extensions import Self

fallthrough_kernel = torch.library.fallthrough_kernel

_KINDS = ("DEF", "IMPL", "FRAGMENT")
_NAMELESS = re.compile(r"\(.*\) -> .*")
# What module-level functions define or implement without a library of the caller's stays for good.
_process_libraries: dict[str, Library] = {}


class Library(torch.library.Library):
    """Operators and kernels that live and die together.

    A library is also a context manager: when it closes, everything registered through it is gone,
    and whoever still holds one of its operators gets an error instead of freed memory.

    Args:
        ns: the namespace.
        kind: `"DEF"` for the one library that defines a namespace, `"FRAGMENT"` for one of several,
            `"IMPL"` for one that only implements operators that exist.
        dispatch_key: with the kind `"IMPL"`, the key that `impl` registers to if it names none.

    Raises:
        ValueError: a kind, a namespace or a dispatch key that PyTorch does not have.
        RuntimeError: the namespace has a `"DEF"` library already.

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
                f"Unsupported kind: {kind!r}; a library is one of {', '.join(_KINDS)}."
            )
        if not isinstance(ns, str) or not (ns == "_" or ns.strip() == ns != ""):
            raise OperatorNameError(f"a library needs the name of a namespace, got {ns!r}.")
        if ns == "prim" and kind != "IMPL":
            raise OperatorNameError(
                "'prim' is a reserved namespace, that of TorchScript; use the name of your package."
            )
        if dispatch_key and dispatch.parse_dispatch_key(dispatch_key) is None:
            raise ValueError(
                f"{dispatch_key!r} is no dispatch key; they are written like 'CPU', 'CUDA', 'Meta' "
                "or 'Autograd'."
            )
        if dispatch_key and kind != "IMPL":
            raise ValueError(
                f"dispatch_key={dispatch_key!r} goes with the kind 'IMPL' only; in a library of "
                f"the kind {kind!r}, name the key in each call of impl."
            )
        return super().__new__(cls)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes back everything that was registered through this library; safe to repeat."""
        self._destroy()

    def define(
        self,
        schema: str,
        alias_analysis: str = "",
        *,
        tags: Tag | Iterable[Tag] = (),
    ) -> str:
        """Defines an operator by its schema.

        Args:
            schema: such as `"add.Tensor(Tensor self, Tensor other) -> Tensor"`. The name may carry
                the namespace of this library.
            alias_analysis: `""` or `"FROM_SCHEMA"` if the schema tells which arguments alias,
                `"CONSERVATIVE"` if any may.
            tags: a `torch.Tag`, or several.

        Returns:
            The name of the operator, without its overload.

        Raises:
            RuntimeError: the schema does not parse, the operator exists, or the namespace is
                another one.
            OperatorGoneError: this library is closed.
        """
        self._check_open()
        if not isinstance(schema, str):
            raise TypeError(f"define expects a schema as a str, got {type(schema).__name__}.")
        given = (tags,) if isinstance(tags, Tag) else tuple(tags)
        # PyTorch accepts the namespace in the name, but some releases then forget to clean it up.
        schema = schema.removeprefix(f"{self.ns}::")
        with registration_lock:
            name: str = super().define(  # type: ignore[no-untyped-call]
                schema, alias_analysis, tags=given
            )
            defined = _name_in(self, schema)
            torch_ops.refresh_packet(defined.namespace, defined.name)
            libraries.on_close(self, _retire(defined))
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
        """Registers a kernel for an operator, ours or PyTorch's own, at a dispatch key.

        The number and types of what the kernel returns are checked against the schema.

        Args:
            op_name: the operator, by name (with or without the namespace) or as an object.
            fn: the kernel, or `fallthrough_kernel` to pass on to the next key.
            dispatch_key: such as `"CPU"`, `"Meta"` or `"Autograd"`; by default that of the library.
            with_keyset: whether the kernel gets the `DispatchKeySet` of the call first, which it
                needs to redispatch.
            allow_override: whether another kernel may stand there already.

        Raises:
            TypeError: `fn` is not callable.
            RuntimeError: an unknown dispatch key, or a kernel that may not be replaced.
            OperatorGoneError: this library is closed.
        """
        self._check_open()
        if not callable(fn):
            raise TypeError(
                f"impl expects a function as the kernel of {op_name}, got {fn!r} of type "
                f"{type(fn).__name__}."
            )
        name = _local_name(self, op_name)
        kernel = fn
        if fn is not fallthrough_kernel:
            kernel = _checked(f"{self.ns}::{name}", fn, with_keyset)
        with registration_lock:
            super().impl(  # type: ignore[no-untyped-call]
                name,
                kernel,
                dispatch_key,
                with_keyset=with_keyset,
                allow_override=allow_override,
            )

    def fallback(
        self, fn: Callable[..., Any], dispatch_key: str = "", *, with_keyset: bool = False
    ) -> None:
        """Registers a kernel for all operators that have none at a dispatch key.

        Args:
            fn: the kernel, which gets the `OpOverload` before the arguments; or
                `fallthrough_kernel`.
            dispatch_key: the key; by default that of the library.
            with_keyset: whether the kernel gets the `DispatchKeySet` of the call first.

        Raises:
            RuntimeError: this library is not one of the namespace `"_"`, which stands for all.
            TypeError: `fn` is not callable.
            ValueError: neither this call nor the library names a key.
            OperatorGoneError: this library is closed.
        """
        self._check_open()
        if not callable(fn):
            raise TypeError(f"fallback expects a function, got {fn!r} of type {type(fn).__name__}.")
        key = dispatch_key or self.dispatch_key
        if not key and self.ns == "_":
            raise ValueError("fallback needs the dispatch key that it is for, such as 'Autocast'.")
        kernel = fn if fn is fallthrough_kernel else _checked_fallback(fn, with_keyset)
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

    def _destroy(self) -> None:
        names = [_naming.parse(qualname) for qualname in self._op_defs]
        with registration_lock, retirement.emptied(names, _gone_with_library):
            libraries.forget_definitions(self)
            super()._destroy()  # type: ignore[no-untyped-call]


def _name_in(library: torch.library.Library, schema: str) -> OpName:
    local = schema.partition("(")[0].strip().removeprefix(f"{library.ns}::")
    return _naming.parse(f"{library.ns}::{local}")


def _local_name(library: torch.library.Library, op: OpLike) -> str:
    if isinstance(op, str) and "::" not in op:
        return op
    name = op_name(op, "impl")
    if name.namespace != library.ns and library.ns != "_":
        raise RuntimeError(
            f"impl: {name} is not in the namespace {library.ns!r} of this library; use a library "
            f"of {name.namespace!r}."
        )
    return name.local


def _retire(name: OpName) -> Callable[[], None]:
    return lambda: retirement.retire_overload(*name, lambda: _gone_with_library(str(name)))


def _gone_with_library(name: str) -> str:
    return f"The operator {name} is gone: the library that defined it was closed."


def _checked(qualname: str, function: Callable[..., Any], with_keyset: bool) -> Callable[..., Any]:
    """Checks what a kernel returns, before PyTorch trusts it to match the schema."""
    name = _naming.parse(qualname)
    check: ResultCheck | None = None
    overload: Any = None
    run = function

    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal check, overload, run
        # A kernel may be registered before the operator is defined, and outlive that definition.
        current = torch_ops.existing_overload(*name) or torch_ops.live_overload(*name)
        if check is None or current is None or current is not overload:
            schema = find_schema(name)
            with registration_lock:
                # Before the others: whoever finds them must not run the one before.
                run = checked(qualname, schema, function, leading=int(with_keyset))
                check, overload = result_check(schema.returns), current
            if current is not None:
                low_level.attach(name, current, schema, check)
        return check(run(*args, **kwargs), qualname)

    def outdate_plan() -> None:
        nonlocal check
        check = None
        low_level.outdate(name)

    vars(kernel)["outdate_plan"] = outdate_plan
    follow(cast(Any, kernel))
    if not with_keyset:
        vars(kernel)[low_level.KERNEL_ATTRIBUTE] = function
    return kernel


def _checked_fallback(function: Callable[..., Any], with_keyset: bool) -> Callable[..., Any]:
    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op: OpOverload = args[1 if with_keyset else 0]
        check = result_check(tuple(str(result.real_type) for result in op._schema.returns))
        return check(function(*args, **kwargs), op._name, "fallback")

    return kernel


# A library of PyTorch's own neither checks what a kernel returns, nor tells those who hold an
# operator that it closes. Where one is passed to the functions below, they see to both.


def _define_in(
    library: torch.library.Library, schema: str, alias_analysis: str, tags: Any = ()
) -> str:
    name: str = library.define(schema, alias_analysis, tags=tags)
    if not isinstance(library, Library):
        libraries.on_close(library, _retire(_name_in(library, schema)))
    return name


def _implement_in(
    library: torch.library.Library, op: OpLike, function: Callable[..., Any], key: str
) -> None:
    if (
        not isinstance(library, Library)
        and callable(function)
        and function is not fallthrough_kernel
    ):
        function = _checked(f"{library.ns}::{_local_name(library, op)}", function, False)
    library.impl(op, function, key)


def _library_for(
    qualname: str, caller: str, lib: torch.library.Library | None
) -> tuple[torch.library.Library, OpName]:
    name = _naming.parse(qualname)
    if lib is None:
        with registration_lock:
            if name.namespace not in _process_libraries:
                _process_libraries[name.namespace] = Library(name.namespace, "FRAGMENT")
            return _process_libraries[name.namespace], name
    if lib.ns != name.namespace:
        warn(
            f"{caller}({qualname!r}): the library is one of namespace {lib.ns!r}, which is used "
            f"instead of {name.namespace!r}.",
            UserWarning,
        )
    return lib, name


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
def define(
    qualname: torch.library.Library, schema: str, alias_analysis: str = ""
) -> Callable[[Function], Function]: ...


def define(
    qualname: str | torch.library.Library,
    schema: str,
    alias_analysis: str = "",
    *,
    lib: torch.library.Library | None = None,
    tags: Tag | Iterable[Tag] = (),
) -> Callable[[Function], Function] | None:
    """Defines an operator by its schema, without a kernel.

    Args:
        qualname: `"namespace::name"` or `"namespace::name.overload"`.
        schema: without a name, such as `"(Tensor x) -> Tensor"`.
        lib: the library that the operator lives in; by default it lives as long as the process.
        tags: a `torch.Tag`, or several.

    `define(library, "name(Tensor x) -> Tensor", alias_analysis="")` is the older form, a decorator
    that also registers the function as the kernel for all devices and for autograd.

    Raises:
        ValueError: `qualname` or `schema` has another form.
        RuntimeError: the schema does not parse, or the operator exists.

    Example:
        >>> import torch, torchop
        >>> torchop.define("docs::times_two", "(Tensor x) -> Tensor")
        >>> @torchop.impl("docs::times_two", "cpu")
        ... def _(x):
        ...     return x * 2
        >>> torch.ops.docs.times_two(torch.ones(1))
        tensor([2.])

    The idea is `torch.library.define`.
    """
    if isinstance(qualname, torch.library.Library):
        return _define_and_implement(qualname, schema, alias_analysis)
    if not isinstance(qualname, str):
        raise ValueError(
            f"define(qualname, schema): expected qualname to be a str such as 'mylib::crop', got "
            f"{type(qualname).__name__}."
        )
    if not isinstance(schema, str):
        raise TypeError(f"define({qualname!r}, schema): expected a str, got {schema!r}.")
    library, name = _library_for(qualname, "define", lib)
    if not _NAMELESS.fullmatch(schema):
        raise SchemaError(
            f'define({qualname!r}, schema): expected schema to look like "(Tensor x) -> Tensor", '
            f"without the name of the operator; got {schema!r}."
        )
    _define_in(library, name.local + schema, "", tags)
    return None


def _define_and_implement(
    library: torch.library.Library, schema: str, alias_analysis: str
) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        _implement_in(library, _define_in(library, schema, alias_analysis), function, "")
        return function

    return decorate


@overload
def impl(
    qualname: OpLike,
    types: str | Sequence[str],
    func: None = None,
    *,
    lib: torch.library.Library | None = None,
) -> Callable[[Function], Function]: ...


@overload
def impl(
    qualname: OpLike,
    types: str | Sequence[str],
    func: Function,
    *,
    lib: torch.library.Library | None = None,
) -> Function: ...


@overload
def impl(
    qualname: torch.library.Library, types: str, func: str | None = None, dispatch_key: str = ""
) -> Callable[[Function], Function]: ...


def impl(
    qualname: OpLike | torch.library.Library,
    types: str | Sequence[str],
    func: Function | str | None = None,
    dispatch_key: str = "",
    *,
    lib: torch.library.Library | None = None,
) -> Function | Callable[[Function], Function]:
    """Registers a kernel for an operator that `define` or C++ defined, or will define.

    Args:
        qualname: the operator.
        types: device types such as `"cpu"`, dispatch keys such as `"Autograd"`, or `"default"` for
            all devices; one or several.
        func: the kernel. Without it, a decorator is returned.
        lib: the library whose lifetime the registration shares; by default it stays for good.

    `impl(library, name, dispatch_key="")` is the older form, a decorator.

    Returns:
        `func`.

    Raises:
        RuntimeError: a device type that PyTorch does not know.
        TypeError: `func` is not callable.

    Example: see `torchop.define`.

    The idea is `torch.library.impl`.
    """
    if isinstance(qualname, torch.library.Library):
        library, name = qualname, cast(OpLike, types)
        key = func if isinstance(func, str) else dispatch_key
        return decorator_or_call(lambda function: _implement_in(library, name, function, key), None)
    keys = [dispatch.kernel_key(kind) for kind in ([types] if isinstance(types, str) else types)]
    library, op = _library_for(str(op_name(qualname, "impl")), "impl", lib)

    def register(function: Callable[..., Any]) -> None:
        for key in dict.fromkeys(keys):
            _implement_in(library, op.local, function, key)

    return decorator_or_call(register, func)  # type: ignore[arg-type]


def get_kernel(op: OpLike, dispatch_key: str | DispatchKey) -> Kernel:
    """Returns the kernel that an operator has for a dispatch key, to call it directly.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        dispatch_key: such as `"CPU"`, or a `torch.DispatchKey`.

    Returns:
        The kernel, called by its method `call_boxed(keyset, *args, **kwargs)`.

    Raises:
        RuntimeError: there is no such operator, or it has no kernel for the key.
        ValueError: `op` or `dispatch_key` is none of the above.

    Example:
        >>> import torch, torchop
        >>> kernel = torchop.get_kernel("aten::sin", "CPU")
        >>> keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        >>> kernel.call_boxed(keys, torch.zeros(1))
        tensor([0.])

    The idea is `torch.library.get_kernel`.
    """
    name = op_name(op, "get_kernel")
    own = own_definition(op, name)
    if own is not None and own.gone is not None:
        raise OperatorGoneError(own.gone)
    return Kernel(name, torch.library.get_kernel(str(name), dispatch_key))


class Kernel:
    """A kernel found by `get_kernel`: callable as long as its operator lives.

    PyTorch's own object notices when the kernel is replaced, but not when the operator goes.
    """

    def __init__(self, name: OpName, kernel: Any) -> None:
        self._name = name
        self._kernel = kernel
        self._overload = torch_ops.lookup_overload(*name)

    def call_boxed(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Calls the kernel with the dispatch keys that it is to see.

        Raises:
            OperatorGoneError: the operator was destroyed.
            RuntimeError: the kernel was.
        """
        self._check_alive()
        return self._kernel.call_boxed(keyset, *args, **kwargs)

    @property
    def op_handle(self) -> Any:
        self._check_alive()
        return self._kernel.op_handle

    def _check_alive(self) -> None:
        if torch_ops.existing_overload(*self._name) is not self._overload:
            raise OperatorGoneError(
                f"This kernel belongs to the operator {self._name}, which was destroyed."
            )
