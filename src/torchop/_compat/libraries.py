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
    """Define an operator with a validated schema, and return its qualified name."""
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
def calls_blocked(qualnames: Iterable[str]) -> Iterator[None]:
    """Block other threads' calls to operators while their kernels change.

    The dispatcher locks registrations but not calls, so a concurrent call would use a freed kernel.
    First, this waits until running calls have ended, but at most for a second, because these calls
    may be waiting for this thread.
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

    Unless `replaces` is true, the operator must be new, and must not have a kernel at this key.
    """
    assert library.m is not None
    qualname = f"{library.ns}::{name}"
    if not replaces:
        library.m.impl(name, key, kernel, with_keyset)
    else:
        with contextlib.ExitStack() as blocks:
            if dispatch.has_kernel(qualname, key):
                # The replacement is intended, so hide PyTorch's warning.
                blocks.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Warning only once", category=UserWarning)
            blocks.enter_context(calls_blocked([qualname]))  # other threads may call the operator
            library.m.impl(name, key, kernel, with_keyset)
    record = f"{library.ns}/{name}/{key}"
    torch.library._impls.add(record)
    library._op_impls.add(record)
    follow(library)
    logs.registration.debug("%s::%s has a kernel at %s", library.ns, name, key)


def implement_temporarily(
    library: torch.library.Library, name: str, key: str, kernel: Callable[..., Any]
) -> Callable[[], None]:
    """Register a Python kernel, and return a function that removes the kernel.

    Destroying `library` also removes the kernel. PyTorch removes kernels only by destroying the
    C++ library that registered them, so this creates one for the kernel.
    """
    code = kernel.__code__
    # Any, because PyTorch's type stubs lack the parameter `with_keyset`.
    registration: Any = torch._C._dispatch_library(
        "IMPL", library.ns, "", code.co_filename, code.co_firstlineno
    )

    def remove() -> None:
        with calls_blocked([f"{library.ns}::{name}"]):
            registration.reset()

    on_close(library, remove)
    # Add the record, so destroying the library frees the function (see `free_kernels`).
    library._op_impls.add(f"{library.ns}/{name}/{key}")
    # Do not use `calls_blocked`, because calls in other threads may be waiting for this thread.
    registration.impl(name, key, kernel, False)
    return remove


def install_view_tracking(library: torch.library.Library, name: str) -> None:
    """Install PyTorch's kernel that marks outputs of a view operator as views."""
    assert library.m is not None
    library.m.register_ad_inplace_or_view_fallback(name)


def on_close(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Run `hook` once, when `library` is destroyed or garbage-collected."""
    library._registration_handles.append(cast(Any, _DestroyOnce(hook)))


def forget_hook(library: torch.library.Library, hook: registries.RegistrationHook) -> None:
    """Undo `on_close`."""
    handles = library._registration_handles
    handles[:] = [h for h in handles if not (isinstance(h, _DestroyOnce) and h._hook == hook)]


class _DestroyOnce:
    """A registration handle that may be destroyed twice, by a library and by its finalizer."""

    __slots__ = ("_hook",)

    def __init__(self, hook: registries.RegistrationHook) -> None:
        self._hook: registries.RegistrationHook | None = hook

    def destroy(self) -> None:
        hook, self._hook = self._hook, None  # first, because the hook may call `destroy` again
        if hook is None:
            return
        try:
            hook()
        except BaseException:
            self._hook = hook  # allow another attempt, e.g. after a call to the operator has ended
            raise


class _DestroyAll(_DestroyOnce):
    """The first handle of a library, which destroys everything registered through it."""

    __slots__ = ()


class _Contents(NamedTuple):
    """A callable that destroys everything registered through a library.

    It must not reference the library, because the library could then not be collected. It
    references the library's sets of names weakly, because PyTorch's
    test/test_python_dispatch.py::test_finalizer requires that only the finalizer references these
    sets.
    """

    m: Any
    handles: list[Any]
    defined_names: weakref.ref[set[str]]
    implemented_names: weakref.ref[set[str]]

    def __call__(self) -> None:
        defined, implemented = self.defined_names(), self.implemented_names()
        if defined is None or implemented is None:
            return  # already destroyed
        names = [operators.parts(qualname) for qualname in defined]
        deregistration.invalidate_existing(names, library_closed_reason)
        for place, handle in enumerate(self.handles):
            if not isinstance(handle, _DestroyOnce):  # PyTorch's handles raise if destroyed twice
                self.handles[place] = cast(Any, _DestroyOnce(handle.destroy))
        kernels = (record.split("/") for record in implemented)
        # If a hook raises, such as `detach` of a user's rule, the stack still calls the remaining
        # callbacks, last one first, and then reraises the exception.
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget, names, defined, implemented)
            stack.enter_context(
                calls_blocked({f"{namespace}::{name}" for namespace, name, _ in kernels})
            )
            if self.m is not None:
                stack.callback(self.m.reset)
            for handle in reversed(self.handles):
                stack.callback(handle.destroy)

    @staticmethod
    def _forget(names: list[Any], defined: set[str], implemented: set[str]) -> None:
        # Remove the names now. PyTorch would do so when it finalizes the library (`_del_library` in
        # torch/library.py), but by then another library may have redefined the operators.
        torch.library._defs.difference_update(defined)
        torch.library._impls.difference_update(implemented)
        if not _is_exiting:
            free_kernels(implemented)
            deregistration.forget(names)
        defined.clear()
        implemented.clear()


def follow(library: torch.library.Library) -> None:
    """Make PyTorch call `end` when a library is destroyed or garbage-collected."""
    handles = library._registration_handles
    if not (handles and isinstance(handles[0], _DestroyAll)):
        names = library._op_defs, library._op_impls
        contents: Any = _Contents(library.m, handles, *map(weakref.ref, names))
        handles.insert(0, cast(Any, _DestroyAll(contents)))


def end(library: torch.library.Library) -> None:
    """Destroy everything registered through a library.

    Every way to deregister operators calls this function.
    """
    follow(library)
    library._registration_handles[0].destroy()


def library_closed_reason(name: str) -> str:
    """Return the error message for an operator whose library was closed."""
    return f"The operator {name} was deregistered: the library that defined it was closed."


def free_kernels(records: Iterable[str]) -> None:
    """Free the kernel functions of closed libraries whose operators were deregistered.

    Workaround for `python_registrations_` in torch/csrc/utils/python_dispatch.cpp: PyTorch keeps
    the last function for each operator and key forever, unless another kernel replaces it. So this
    function registers another kernel that references nothing, and removes it again.
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


# Kernels of closed libraries that PyTorch still references.
_unfreed: set[str] = set()
# For each namespace, the C++ library that frees these kernels. It is reused, because each such
# library leaks 48 bytes (`leaked_python_filenames_` in torch/csrc/utils/python_dispatch.cpp).
_freeing: dict[str, Any] = {}


def _is_deregistered(record: str) -> bool:
    """Return whether the dispatcher has no entry for a kernel's operator."""
    namespace, name, _ = record.split("/")
    # The namespace "_" contains kernels for operators that other libraries define.
    return namespace != "_" and not operators.has_entry(namespace, *name.partition(".")[::2])


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    raise OperatorGoneError("This operator was deregistered.")


# Whether the process is exiting. PyTorch then finalizes all libraries, but their kernels need not
# be freed.
_is_exiting = False


@atexit.register
def _exit() -> None:
    global _is_exiting
    _is_exiting = True


@contextlib.contextmanager
def probe_operators() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield two new operators with their CPU kernel, to probe PyTorch's C++ objects.

    The kernel of the second operator takes dispatch keys.
    """

    def kernel() -> None:
        pass

    library = torch.library.Library("_torchop_probe", "FRAGMENT")
    try:
        for name in ("plain", "with_keys"):
            define(library, f"{name}() -> ()", ())  # not `library.define`, which may be watched
            implement(library, name, "CPU", kernel, with_keyset=name == "with_keys")
        yield "_torchop_probe::plain", "_torchop_probe::with_keys", kernel
    finally:
        library._destroy()
