"""What a `torch.library.Library` defines and registers, and what happens when it is destroyed."""

from __future__ import annotations

import atexit
import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.library

from torchop import _hooks
from torchop._compat import deregistration, dispatch, logs, operators, registries
from torchop._compat.classes import Tag
from torchop._errors import OperatorGoneError, short_errors


def define(library: torch.library.Library, schema: str, tags: Iterable[Tag]) -> str:
    """Defines an operator whose schema was checked before, without checking it again.

    Returns:
        Its name, with the namespace.
    """
    assert library.m is not None
    with short_errors:
        library.m.define(schema, "", tuple(tags))
    qualname = f"{library.ns}::{schema[: schema.index('(')]}"
    library._op_defs.add(qualname)
    torch.library._defs.add(qualname)
    follow(library)
    logs.registration.debug("%s::%s is defined", library.ns, schema)
    return qualname


@contextlib.contextmanager
def calls_held(qualnames: Iterable[str]) -> Iterator[None]:
    """Keeps the calls of other threads out of the dispatcher while kernels of operators change.

    PyTorch does not: it frees what such a call reads next. Waiting for those that are there already
    takes a second at most, because they may wait for this thread.
    """
    change = _hooks.extension.hold_calls(qualnames)
    try:
        yield
    finally:
        del change


def implement(
    library: torch.library.Library,
    name: str,
    key: str,
    kernel: Callable[..., Any],
    *,
    with_keyset: bool = False,
    replaces: bool = False,
) -> None:
    """Registers a Python kernel at one dispatch key; `replaces` allows that it has one already.

    Without `replaces`, the operator must be new.
    """
    assert library.m is not None
    qualname = f"{library.ns}::{name}"
    if not replaces:
        library.m.impl(name, key, kernel, with_keyset)
    else:
        with contextlib.ExitStack() as blocks:
            if dispatch.has_kernel(qualname, key):
                # PyTorch warns once per process when a kernel is replaced, which is meant here.
                blocks.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Warning only once", category=UserWarning)
            blocks.enter_context(calls_held([qualname]))  # as the operator is not new
            library.m.impl(name, key, kernel, with_keyset)
    record = f"{library.ns}/{name}/{key}"
    torch.library._impls.add(record)
    library._op_impls.add(record)
    follow(library)
    logs.registration.debug("%s::%s has a kernel at %s", library.ns, name, key)


def implement_for_now(
    library: torch.library.Library, name: str, key: str, kernel: Callable[..., Any]
) -> Callable[[], None]:
    """Registers a Python kernel; the returned function takes it back, as closing the library does.

    PyTorch can remove a kernel only with the registration that it belongs to.
    """
    code = kernel.__code__
    # PyTorch's stubs do not know `with_keyset`.
    registration: Any = torch._C._dispatch_library(
        "IMPL", library.ns, "", code.co_filename, code.co_firstlineno
    )

    def take_back() -> None:
        with calls_held([f"{library.ns}::{name}"]):
            registration.reset()

    on_close(library, take_back)
    library._op_impls.add(f"{library.ns}/{name}/{key}")  # so that its end frees the function
    registration.impl(name, key, kernel, False)  # calls of other threads may wait for this one
    return take_back


def install_view_tracking(library: torch.library.Library, name: str) -> None:
    """Installs PyTorch's kernel that marks the outputs of a view operator as views."""
    assert library.m is not None
    library.m.register_ad_inplace_or_view_fallback(name)


def on_close(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Runs `hook` once, when a library, ours or PyTorch's, is destroyed or collected."""
    library._registration_handles.append(cast(Any, _Once(hook)))


def forget_hook(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Takes back what `on_close` added."""
    handles = library._registration_handles
    handles[:] = [h for h in handles if not (isinstance(h, _Once) and h._hook == hook)]


class _Once:
    """A registration handle that may be destroyed twice: by a library, and by its finalizer."""

    __slots__ = ("_hook",)

    def __init__(self, hook: registries.RegistrationHook) -> None:
        self._hook: registries.RegistrationHook | None = hook

    def destroy(self) -> None:
        hook, self._hook = self._hook, None  # first, for a hook that destroys the library again
        if hook is not None:
            hook()


class _End(_Once):
    """The first handle of a library, which ends all that lives in it."""

    __slots__ = ()


class _Contents(NamedTuple):
    """What lives in a library, and ends when it is called.

    Not the library itself, which could not be collected then. References to its sets of names are
    weak, because PyTorch's test/test_python_dispatch.py::test_finalizer requires that the finalizer
    of a library is the last to use them. Destroying a library keeps the sets alive.
    """

    m: Any
    handles: list[Any]
    defined_names: weakref.ref[set[str]]
    implemented_names: weakref.ref[set[str]]

    def __call__(self) -> None:
        defined, implemented = self.defined_names(), self.implemented_names()
        if defined is None or implemented is None:
            return  # the library ended before
        names = [operators.parts(qualname) for qualname in defined]
        deregistration.retire_existing(names, gone_with_library)
        for place, handle in enumerate(self.handles):
            if not isinstance(handle, _Once):  # PyTorch's own fail when they are destroyed again
                self.handles[place] = cast(Any, _Once(handle.destroy))
        kernels = (record.split("/") for record in implemented)
        # Also after a hook that raises, such as `detach` of a user's rule: a stack goes on with the
        # rest, from its top, and then raises the exception.
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget, names, defined, implemented)
            stack.enter_context(
                calls_held({f"{namespace}::{name}" for namespace, name, _ in kernels})
            )
            if self.m is not None:
                stack.callback(self.m.reset)
            for handle in reversed(self.handles):
                stack.callback(handle.destroy)

    @staticmethod
    def _forget(names: list[Any], defined: set[str], implemented: set[str]) -> None:
        # PyTorch would remove the names when it finalizes the library. By then, other libraries may
        # have defined them again; and `kept_packet` keeps their packets in `torch.ops`.
        torch.library._defs.difference_update(defined)
        torch.library._impls.difference_update(implemented)
        if not _is_exiting:
            free_kernels(implemented)
            deregistration.forget(names)
        defined.clear()
        implemented.clear()


def follow(library: torch.library.Library) -> None:
    """Has a library end as `end` does it, also where PyTorch destroys or collects it."""
    handles = library._registration_handles
    if not (handles and isinstance(handles[0], _End)):
        names = library._op_defs, library._op_impls
        contents: Any = _Contents(library.m, handles, *map(weakref.ref, names))
        handles.insert(0, cast(Any, _End(contents)))


def end(library: torch.library.Library) -> None:
    """Ends all that lives in a library, before it is destroyed.

    Whatever is to be done for operators that are gone, of any kind, is done here.
    """
    follow(library)
    library._registration_handles[0].destroy()


def gone_with_library(name: str) -> str:
    """What those are told who hold an operator whose library is closed."""
    return f"The operator {name} is gone: the library that defined it was closed."


def free_kernels(records: Iterable[str]) -> None:
    """Frees the functions of kernels whose library is closed, once their operators are gone.

    PyTorch keeps the last function for each operator and key, by name and for ever, and so all that
    the function refers to. Only another kernel takes its place.
    """
    _unfreed.update(records)
    gone = [record for record in tuple(_unfreed) if _is_gone(record)]
    for namespace, name, key in (record.split("/") for record in gone):
        if namespace not in _freeing:
            _freeing[namespace] = torch._C._dispatch_library("IMPL", namespace, "", "torchop", 0)
        try:
            _freeing[namespace].impl(name, key or "CompositeImplicitAutograd", _no_kernel)
        finally:
            _freeing[namespace].reset()
    _unfreed.difference_update(gone)


# Kernels of closed libraries, of which PyTorch still has the function.
_unfreed: set[str] = set()
# What frees those of a namespace. PyTorch keeps some 48 bytes of every library that is ever made.
_freeing: dict[str, Any] = {}


def _is_gone(record: str) -> bool:
    """Whether the dispatcher has no entry of an operator that had a kernel."""
    namespace, name, _ = record.split("/")
    # A library of the namespace "_" implements operators of others, which stay.
    return namespace != "_" and not operators.has_entry(namespace, *name.partition(".")[::2])


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    raise OperatorGoneError("This operator is gone.")


# When the process ends, PyTorch finalizes every library, and nothing needs to be freed any more.
_is_exiting = False


@atexit.register
def _exit() -> None:
    global _is_exiting
    _is_exiting = True


@contextlib.contextmanager
def probe_operators() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yields the names of two operators and their CPU kernel; the second passes dispatch keys."""

    def kernel() -> None:
        pass

    library = torch.library.Library("_torchop_probe", "FRAGMENT")
    try:
        for name in ("plain", "with_keys"):
            define(library, f"{name}() -> ()", ())  # not seen by `watch_definitions`
            implement(library, name, "CPU", kernel, with_keyset=name == "with_keys")
        yield "_torchop_probe::plain", "_torchop_probe::with_keys", kernel
    finally:
        library._destroy()
