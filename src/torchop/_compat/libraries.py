"""Define operators and register kernels through a `torch.library.Library`.

Both are undone when the library is destroyed or garbage-collected.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.library

from torchop import _hooks
from torchop._compat import dispatch, logs, operators, registries, torch_ops
from torchop._compat.classes import Tag
from torchop._errors import OperatorGoneError, short_errors


def define(library: torch.library.Library, schema: str, tags: Iterable[Tag]) -> str:
    """Define an operator from a validated schema, and return its qualified name."""
    assert library.m is not None
    with short_errors:
        library.m.define(schema, "", tuple(tags))
    qualname = f"{library.ns}::{schema[: schema.index('(')]}"
    library._op_defs.add(qualname)
    torch.library._defs.add(qualname)
    follow(library)
    logs.registration.debug("%s::%s is defined", library.ns, schema)
    return qualname


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

    Pass `replaces=True` if the operator may already have a kernel at this key.
    """
    assert library.m is not None
    if replaces and dispatch.has_kernel(f"{library.ns}::{name}", key):
        # Hide PyTorch's warning about the replaced kernel, since the replacement is intended.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once", category=UserWarning)
            library.m.impl(name, key, kernel, with_keyset)
    else:
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

    PyTorch can only remove a kernel by destroying the C++ library object that registered it, so
    this function creates a separate object for each kernel. The kernel must be removed before
    `library` is destroyed.
    """
    qualname = f"{library.ns}::{name}"
    reference = weakref.ref(library)  # the kernel must not keep the library alive
    code = kernel.__code__
    # Declared as Any, because PyTorch's type stubs lack the parameter `with_keyset`.
    registration: Any = torch._C._dispatch_library(
        "IMPL", library.ns, "", code.co_filename, code.co_firstlineno
    )

    def remove() -> None:
        finish = _hooks.extension.keep_memory((), [qualname], True)
        registration.reset()
        # Other threads may still be calling the kernel, so free its function only when the library
        # is destroyed.
        if (alive := reference()) is not None:
            on_close(alive, finish)

    # Record the kernel in `library`, because `free_kernels` frees the functions of all recorded
    # kernels when the library is destroyed.
    library._op_impls.add(f"{library.ns}/{name}/{key}")
    registration.impl(name, key, kernel, False)
    return remove


def install_view_tracking(library: torch.library.Library, name: str) -> None:
    """Install PyTorch's kernel that marks the results of a view operator as views."""
    assert library.m is not None
    library.m.register_ad_inplace_or_view_fallback(name)


def on_close(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Run `hook` once, when `library` is destroyed.

    If the garbage collector finalizes the library while a registration is running, the hook is
    deferred to `run_waiting_hooks`. The library may be destroyed under the registration lock, so
    the hook must not call user code.
    """
    library._registration_handles.append(cast(Any, _DestroyOnce(hook, weakref.ref(library))))


def after_close(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Queue `hook` for `run_waiting_hooks` when `library` is destroyed or garbage-collected.

    Unlike the hooks that are passed to `on_close`, this hook may call user code.
    """
    on_close(library, lambda: waiting_hooks.append((hook, False)))


# The registration lock. `_core.lock` sets this variable.
lock: Any = threading.RLock()
# Hooks for `run_waiting_hooks`, each with a flag that tells whether the garbage collector queued
# it. Appending to a deque is atomic, so finalizers need no lock.
waiting_hooks: collections.deque[tuple[registries.RegistrationHook, bool]] = collections.deque()


def run_waiting_hooks() -> None:
    """Run the hooks of closed libraries. The caller must not hold the registration lock.

    If any hooks raise, the first exception is reraised after all hooks have run. An exception from
    a hook that the garbage collector queued is only logged, because the caller has nothing to do
    with that library.
    """
    first: BaseException | None = None
    while waiting_hooks:
        try:
            hook, is_collected = waiting_hooks.popleft()
        except IndexError:  # another thread has taken the last hook
            break
        try:
            hook()
        except BaseException as error:
            if is_collected and isinstance(error, Exception):
                logs.registration.exception("removing the rules of a collected library failed")
            else:
                first = first or error
    if first is not None:
        raise first


class _DestroyOnce:
    """A registration handle that runs a hook only once.

    This is needed because PyTorch destroys these handles twice: when a library is destroyed, and
    when it is finalized.
    """

    __slots__ = ("_hook", "_library")

    def __init__(
        self,
        hook: registries.RegistrationHook,
        library: weakref.ref[torch.library.Library] | None = None,
    ) -> None:
        self._hook: registries.RegistrationHook | None = hook
        self._library = library

    def destroy(self) -> None:
        if self._library is None or self._library() is not None or _is_exiting:
            self._run()
        elif not lock._is_owned() and lock.acquire(blocking=False):
            try:
                self._run()
            finally:
                lock.release()
        else:
            # The garbage collector is running this, so it must not wait for the lock (see
            # `_core.lock`).
            waiting_hooks.append((self._run, True))

    def _run(self) -> None:
        hook, self._hook = self._hook, None  # first, because the hook may call `destroy` again
        if hook is None:
            return
        try:
            hook()
        except BaseException:
            # Keep the hook, so that destroying the library can be retried. For example, a hook
            # raises if it runs during a call to the operator, but succeeds once the call has
            # returned.
            self._hook = hook
            raise


class _DestroyAll(_DestroyOnce):
    """A library's first registration handle, which destroys everything that was registered."""

    __slots__ = ()


class _Contents(NamedTuple):
    """A callable that destroys everything that was registered through a library.

    It must not reference the library itself, or the library could never be garbage-collected. It
    holds the library's sets of names only weakly, because PyTorch's test `test_finalizer`
    (test/test_python_dispatch.py) checks that only the finalizer keeps these sets alive.
    """

    m: Any
    handles: list[Any]
    defined_names: weakref.ref[set[str]]
    implemented_names: weakref.ref[set[str]]

    def __call__(self) -> None:
        defined, implemented = self.defined_names(), self.implemented_names()
        if defined is None or implemented is None:
            return  # already destroyed
        reasons = closing_reasons(defined)
        torch_ops.invalidate(reasons, only_existing=True)
        for place, handle in enumerate(self.handles):
            # Wrap PyTorch's own handles, because destroying them twice raises an error.
            if not isinstance(handle, _DestroyOnce):
                self.handles[place] = cast(Any, _DestroyOnce(handle.destroy))
        qualnames = {operators.joined(*name) for name in reasons}
        records = (record.split("/") for record in implemented)
        others = {f"{namespace}::{name}" for namespace, name, _ in records} - qualnames
        # If a callback raises, for example the `detach` method of a user's `torchop.Rule`,
        # ExitStack still runs the others, in reverse order, and then reraises the exception.
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget, reasons, defined, implemented)
            # This library may have registered kernels for another library's operator, and a call
            # may still be running one of them, so keep the kernels' functions alive.
            stack.callback(_hooks.extension.keep_memory((), others, False))
            stack.callback(_hooks.extension.keep_memory(qualnames, (), True))
            if self.m is not None:
                stack.callback(self.m.reset)
            for handle in reversed(self.handles):
                stack.callback(handle.destroy)

    @staticmethod
    def _forget(names: Iterable[torch_ops.Name], defined: set[str], implemented: set[str]) -> None:
        # Remove the names now. PyTorch would do so only when it finalizes the library
        # (`_del_library` in torch/library.py), and by then another library may have defined
        # operators with the same names.
        torch.library._defs.difference_update(defined)
        torch.library._impls.difference_update(implemented)
        if not _is_exiting:
            free_kernels(implemented)
            torch_ops.forget(names)
        defined.clear()
        implemented.clear()


def follow(library: torch.library.Library) -> None:
    """Make sure that everything registered through a library is destroyed along with it."""
    handles = library._registration_handles
    if not (handles and isinstance(handles[0], _DestroyAll)):
        names = library._op_defs, library._op_impls
        contents: Any = _Contents(library.m, handles, *map(weakref.ref, names))
        handles.insert(0, cast(Any, _DestroyAll(contents)))


def end(library: torch.library.Library) -> None:
    """Destroy everything registered through a library. Called whenever a library is closed."""
    follow(library)
    library._registration_handles[0].destroy()


def deregister(library: torch.library.Library, name: torch_ops.Name) -> None:
    """Destroy the library of an invalidated operator."""
    registries.unpublish(operators.joined(*name), library)
    end(library)
    library._destroy()


def closing_reason(name: str) -> str:
    return f"The operator {name} was deregistered: the library that defined it was closed."


def closing_reasons(qualnames: Iterable[str]) -> dict[torch_ops.Name, str]:
    names = map(operators.parts, qualnames)
    return {name: closing_reason(operators.joined(*name)) for name in names}


def free_kernels(records: Iterable[str]) -> None:
    """Free the kernel functions of closed libraries after their operators were deregistered.

    Workaround for `python_registrations_` in torch/csrc/utils/python_dispatch.cpp: for each
    operator and key, PyTorch keeps the last registered function alive until another function is
    registered for the same operator and key. So register `_no_kernel`, which references nothing,
    and remove the registration again.
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


# The records (`namespace/name/key`) of kernels that PyTorch still keeps alive although their
# libraries are closed.
_unfreed: set[str] = set()
# Maps each namespace to the C++ library object that `free_kernels` registers functions with. The
# object is reused because PyTorch leaks 48 bytes for each library object
# (`leaked_python_filenames_` in torch/csrc/utils/python_dispatch.cpp).
_freeing: dict[str, Any] = {}


def _is_deregistered(record: str) -> bool:
    namespace, name, _ = record.split("/")
    # Skip the namespace "_". `Library("_", "IMPL")` registers kernels for operators of other
    # libraries, so its records do not contain the operators' namespaces.
    return namespace != "_" and not operators.has_entry(namespace, *name.partition(".")[::2])


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    raise OperatorGoneError("This operator was deregistered.")


# True while the process exits. PyTorch then finalizes all libraries, and freeing their kernels
# would be a waste of time.
_is_exiting = False


@atexit.register
def _exit() -> None:
    global _is_exiting
    _is_exiting = True


@contextlib.contextmanager
def probe_operators() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the names of two temporary operators, and the CPU kernel that both use.

    torchop's C++ extension examines these operators to learn how PyTorch stores kernels in memory.
    Only the kernel of the second operator receives the dispatch keys.
    """

    def kernel() -> None:
        pass

    library = torch.library.Library("_torchop_probe", "FRAGMENT")
    try:
        for name in ("plain", "with_keys"):
            # Avoid the method `library.define`, because other code may have monkeypatched it.
            define(library, f"{name}() -> ()", ())
            implement(library, name, "CPU", kernel, with_keyset=name == "with_keys")
        yield "_torchop_probe::plain", "_torchop_probe::with_keys", kernel
    finally:
        library._destroy()
