"""Define and register through a `torch.library.Library`, and clean up when it is destroyed."""

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
    """Define an operator with a validated schema.

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
    """Keep calls of other threads out of the dispatcher while kernels of operators change.

    PyTorch does not lock against calls, so they would read freed kernels. Waiting for running calls
    is limited to a second, because they may wait for this thread.
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
    """Register a Python kernel at one dispatch key.

    Without `replaces`, the operator must be new and without a kernel at this key.
    """
    assert library.m is not None
    qualname = f"{library.ns}::{name}"
    if not replaces:
        library.m.impl(name, key, kernel, with_keyset)
    else:
        with contextlib.ExitStack() as blocks:
            if dispatch.has_kernel(qualname, key):
                # Replacing a kernel is intended, so hide PyTorch's warning.
                blocks.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Warning only once", category=UserWarning)
            blocks.enter_context(calls_held([qualname]))  # as the operator is not new
            library.m.impl(name, key, kernel, with_keyset)
    record = f"{library.ns}/{name}/{key}"
    torch.library._impls.add(record)
    library._op_impls.add(record)
    follow(library)
    logs.registration.debug("%s::%s has a kernel at %s", library.ns, name, key)


def implement_temporarily(
    library: torch.library.Library, name: str, key: str, kernel: Callable[..., Any]
) -> Callable[[], None]:
    """Register a Python kernel, and return a function that removes it.

    Destroying `library` removes the kernel too. PyTorch removes a kernel only when it destroys the
    registration that owns it.
    """
    code = kernel.__code__
    # PyTorch's type stubs lack `with_keyset`.
    registration: Any = torch._C._dispatch_library(
        "IMPL", library.ns, "", code.co_filename, code.co_firstlineno
    )

    def remove() -> None:
        with calls_held([f"{library.ns}::{name}"]):
            registration.reset()

    on_close(library, remove)
    # so that destroying the library frees the function
    library._op_impls.add(f"{library.ns}/{name}/{key}")
    # without `calls_held`: calls of other threads may wait for this thread
    registration.impl(name, key, kernel, False)
    return remove


def install_view_tracking(library: torch.library.Library, name: str) -> None:
    """Install PyTorch's kernel that marks outputs of a view operator as views."""
    assert library.m is not None
    library.m.register_ad_inplace_or_view_fallback(name)


def on_close(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Run `hook` once, when `library` is destroyed or collected."""
    library._registration_handles.append(cast(Any, _Once(hook)))


def forget_hook(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Undo `on_close`."""
    handles = library._registration_handles
    handles[:] = [h for h in handles if not (isinstance(h, _Once) and h._hook == hook)]


class _Once:
    """A registration handle that both a library and its finalizer may destroy."""

    __slots__ = ("_hook",)

    def __init__(self, hook: registries.RegistrationHook) -> None:
        self._hook: registries.RegistrationHook | None = hook

    def destroy(self) -> None:
        hook, self._hook = self._hook, None  # the hook may destroy it again
        if hook is None:
            return
        try:
            hook()
        except BaseException:
            self._hook = hook  # a library whose operator is running can be destroyed later
            raise


class _End(_Once):
    """The first handle of a library, which destroys everything registered through it."""

    __slots__ = ()


class _Contents(NamedTuple):
    """Everything registered through a library; calling it destroys all of this.

    It must not reference the library, or the library could not be collected. It references the sets
    of names weakly, because test/test_python_dispatch.py::test_finalizer of PyTorch requires that
    the finalizer holds the last reference. The sets outlive a library's `_destroy`.
    """

    m: Any
    handles: list[Any]
    defined_names: weakref.ref[set[str]]
    implemented_names: weakref.ref[set[str]]

    def __call__(self) -> None:
        defined, implemented = self.defined_names(), self.implemented_names()
        if defined is None or implemented is None:
            return  # destroyed before
        names = [operators.parts(qualname) for qualname in defined]
        deregistration.invalidate_existing(names, library_closed_reason)
        for place, handle in enumerate(self.handles):
            if not isinstance(handle, _Once):  # PyTorch's handles fail when destroyed twice
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
        # PyTorch would remove the names when it finalizes the library. By then other libraries may
        # have redefined the operators, and `preserve_packet` keeps their packets in `torch.ops`.
        torch.library._defs.difference_update(defined)
        torch.library._impls.difference_update(implemented)
        if not _is_exiting:
            free_kernels(implemented)
            deregistration.forget(names)
        defined.clear()
        implemented.clear()


def follow(library: torch.library.Library) -> None:
    """Make PyTorch run `end` when it destroys or collects a library."""
    handles = library._registration_handles
    if not (handles and isinstance(handles[0], _End)):
        names = library._op_defs, library._op_impls
        contents: Any = _Contents(library.m, handles, *map(weakref.ref, names))
        handles.insert(0, cast(Any, _End(contents)))


def end(library: torch.library.Library) -> None:
    """Destroy everything registered through a library.

    All cleanup for deregistered operators, of any kind, happens here.
    """
    follow(library)
    library._registration_handles[0].destroy()


def library_closed_reason(name: str) -> str:
    """Return the error message for an operator whose library was closed."""
    return f"The operator {name} was deregistered: the library that defined it was closed."


def free_kernels(records: Iterable[str]) -> None:
    """Free kernel functions of closed libraries after their operators were deregistered.

    PyTorch keeps the last function per operator and key forever, and only another kernel replaces
    it.
    """
    _unfreed.update(records)
    deregistered = [record for record in tuple(_unfreed) if _is_deregistered(record)]
    for namespace, name, key in (record.split("/") for record in deregistered):
        if namespace not in _freeing:
            _freeing[namespace] = torch._C._dispatch_library("IMPL", namespace, "", "torchop", 0)
        try:
            _freeing[namespace].impl(name, key or "CompositeImplicitAutograd", _no_kernel)
        finally:
            _freeing[namespace].reset()
    _unfreed.difference_update(deregistered)


# Kernels of closed libraries whose function PyTorch still holds.
_unfreed: set[str] = set()
# One registration per namespace to free them, because PyTorch leaks 48 bytes per library.
_freeing: dict[str, Any] = {}


def _is_deregistered(record: str) -> bool:
    """Return whether the dispatcher has no entry for a kernel's operator."""
    namespace, name, _ = record.split("/")
    # Libraries of namespace "_" implement operators of other libraries, which stay.
    return namespace != "_" and not operators.has_entry(namespace, *name.partition(".")[::2])


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    raise OperatorGoneError("This operator was deregistered.")


# At exit PyTorch finalizes every library, and no kernels need to be freed.
_is_exiting = False


@atexit.register
def _exit() -> None:
    global _is_exiting
    _is_exiting = True


@contextlib.contextmanager
def probe_operators() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield two probe operators and their CPU kernel; the second operator passes dispatch keys."""

    def kernel() -> None:
        pass

    library = torch.library.Library("_torchop_probe", "FRAGMENT")
    try:
        for name in ("plain", "with_keys"):
            define(library, f"{name}() -> ()", ())  # bypasses `watch_definitions`
            implement(library, name, "CPU", kernel, with_keyset=name == "with_keys")
        yield "_torchop_probe::plain", "_torchop_probe::with_keys", kernel
    finally:
        library._destroy()
