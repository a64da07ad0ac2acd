"""Load the C++ extension when an operator is first used, so that it runs the operators' calls."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torchop import _hooks
from torchop._compat import (
    compilers,
    dynamo_variables,
    import_hooks,
    libraries,
    overload_functions,
    registries,
)
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import Handle
from torchop._errors import NativeBuildWarning
from torchop._native.extension import api, recipe
from torchop._native.plan import OwnCalls
from torchop._rules.kernels import rule

log = logging.getLogger(__name__)


# The extension module, or None if it is not loaded. It is set only once C++ can run the calls to
# all existing operators.
_native: Any = None
# Callbacks from `request`, which `_ready` calls once the extension is loaded
_waiting: list[Callable[[], None]] = []
# If no compiled extension was found, it is compiled after this number of calls. Only calls in which
# the dispatcher runs the operator's kernel are counted. Short programs make fewer calls, so they
# never start a compiler, while programs for which call overhead matters reach the limit within a
# second.
CALLS_BEFORE_BUILD = 1000
_calls = itertools.count(1)  # `next` is atomic, so no lock is needed
# The class of handles whose calls run in C++. (A handle is the object that `torchop.custom_op`
# returns.) The list is empty until the extension is loaded. If loading is retried after an error,
# the class is reused, because the extension can create it only once.
_native_handle_types: list[type] = []


def native_module() -> Any | None:
    return _native


def start() -> None:
    """Load the extension during `import torchop` if TORCHOP_NATIVE=require.

    An invalid value of TORCHOP_NATIVE raises an error only when the first operator is defined, so
    that `python -m torchop` can still import torchop and report the error in one line.
    """
    if os.environ.get("TORCHOP_NATIVE") == "require":
        obtain()


def obtain() -> None:
    """Load the compiled extension, or start to count calls if there is none.

    Calling this again is a no-op, and so is calling it under `torch.jit.trace`. `torch.jit.trace`
    runs the traced code twice and compares the Python frames of operator calls. These frames would
    differ if calls became native (ran without the dispatcher) between the two runs.
    """
    if (_native is None or not _first_use.is_over) and not compilers.torchscript_is_tracing():
        _obtain()


def _obtain() -> None:
    api.extension.obtain(_ready)
    _first_use.end()
    if api.extension.is_deferred:
        _hooks.count_call = count_call


def count_call() -> None:
    """Count a call that runs a kernel. After enough calls, start to compile the extension."""
    if next(_calls) >= CALLS_BEFORE_BUILD and not compilers.torchscript_is_tracing():
        _hooks.count_call = None
        api.extension.obtain(_ready, build=True)


def _after_fork() -> None:
    """Restart the count in a forked child, since the compiling thread exists only in the parent."""
    global _calls
    if api.extension.status().state == "idle" and _first_use.is_over:
        _calls = itertools.count(1)
        _hooks.count_call = count_call


if hasattr(os, "register_at_fork"):  # missing on Windows
    os.register_at_fork(after_in_child=_after_fork)


def _obtain_for_dynamo() -> None:
    """Load the extension when Dynamo is imported.

    Errors are not raised here, because they would make the import of Dynamo fail.
    """
    try:
        _obtain()
    except NativeBuildWarning as problem:  # the user's filters turn the warning into an error
        log.warning("%s", problem)
    except RecursionError:
        pass  # loading is tried again when an operator is used


def wait(timeout: float | None = None) -> bool:
    """Load the extension, compiling it first if needed, and return whether it is loaded."""
    is_there = api.extension.wait(_ready, timeout)
    _first_use.end()
    _hooks.count_call = None  # the extension is loaded, being compiled or turned off
    return is_there


class _FirstUse:
    """Load the extension when an operator is first used.

    Defining an operator is not enough, because a program may import a package with hundreds of
    operators and call none of them.
    """

    def __init__(self) -> None:
        self.is_over = False
        # The original `__call__` of the handle class, as long as `_first_call` replaces it
        self.call: Callable[..., Any] | None = None
        self._first_call: Callable[..., Any] | None = None

    def wait(self) -> None:
        """Make the first call to an operator, or the import of Dynamo, load the extension."""
        if self._first_call is not None or self.is_over:
            return
        api.mode()  # raises if the environment variable is invalid
        # Loading changes the type of handles, which must not happen during tracing because Dynamo
        # guards on the type. So load the extension as soon as Dynamo is imported.
        import_hooks.when_imported(compilers.DYNAMO, _obtain_for_dynamo)
        call = self.call = _hooks.handle_type.__call__

        @functools.wraps(call)
        def first_call(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
            obtain()
            # Call `handle(...)` only if its calls now run in C++. Otherwise, `handle(...)` might
            # call a function that other code has set as `__call__` and that calls this function,
            # and the recursion would never end.
            is_native = type(handle) in _native_handle_types
            return handle(*args, **kwargs) if is_native else call(handle, *args, **kwargs)

        if not self.is_over:  # `end` has already run if Dynamo was imported before
            self._first_call = _hooks.handle_type.__call__ = first_call

    def end(self) -> None:
        with registration_lock:
            # Other code may have replaced `__call__` in the meantime. Do not overwrite that
            # replacement.
            if _hooks.handle_type.__call__ is self._first_call:
                _hooks.handle_type.__call__ = self.call
            self.is_over = True


_first_use = _FirstUse()


def new_handle_type() -> Any:
    return _hooks.handle_type if _native is None else _native_handle_types[0]


def make_native(definition: Definition) -> None:
    if _native is None:
        _first_use.wait()
    if _native is not None and definition.entry is None:
        _adopt(definition, _native)


def request(on_ready: Callable[[], None]) -> None:
    """Load the extension, and call `on_ready` once it is loaded.

    `on_ready` may be called in another thread. If loading fails, it is never called.
    """
    obtain()
    with registration_lock:
        is_loaded = _native is not None
        if not is_loaded and api.status().state not in ("off", "failed"):
            _waiting.append(on_ready)
    if is_loaded:
        on_ready()


def _ready(module: ModuleType) -> None:
    """Let C++ run calls to all existing operators. Called once the extension is loaded.

    This may raise, for example if a filter turns a warning into an error. It is then called again
    the next time an operator is used.
    """
    global _native
    with registration_lock:
        if _native is None:
            _prepare(module)
            for handle in registries.published_handles():
                if isinstance(handle, Handle) and handle._definition.deregistration_reason is None:
                    _adopt(handle._definition, module)
                    # If there is a call plan, the operator was already used, perhaps only through
                    # torch.ops, so let C++ run the calls made through torch.ops too.
                    if handle._definition.has_plan:
                        handle._definition.calls.attach()
                        if handle._definition.rule(rule.KernelRule).providers is not None:
                            # The existing call plan selects providers (alternative kernels) in
                            # Python. Replace it with a plan that lets C++ select them.
                            handle._definition.outdate_plan()
            # Set this last, so that `obtain` calls this function again if the code above raises.
            _native = module
    while _waiting:
        _waiting[-1]()
        _waiting.pop()


def _prepare(module: ModuleType) -> None:
    """Connect the extension with PyTorch, Dynamo and torchop's lower layers.

    It must be safe to call this again after an error.
    """
    # The memory layout of PyTorch's C++ objects for Python kernels is not public, so the extension
    # infers it from two operators with known kernels.
    with libraries.probe_operators() as probes:
        if not module.probe_kernels(*probes):
            raise ImportError(
                "this version of torchop does not support how this PyTorch stores Python kernels"
            )
    if not _native_handle_types:
        # Copy `__call__` and the properties into the new type, because Dynamo looks for them only
        # in a handle's own type, not in its base classes.
        base = _hooks.handle_type
        members = vars(base).items()
        traceable: dict[str, Any] = {k: v for k, v in members if isinstance(v, property)}
        traceable["__call__"] = _first_use.call or base.__call__
        _native_handle_types.append(module.make_handle_type(base, traceable))
    dynamo_variables.trace_as_overload(_native_handle_types[0])
    for cls in overload_functions.forwarding_classes():
        module.patch_calls(cls)
    if (problem := recipe.unknown_nodes()) is not None:
        log.warning("Calls that record a gradient go through the dispatcher: %s.", problem)
    _hooks.extension = module


def _adopt(definition: Definition, native: Any) -> None:
    if definition.calls is None:
        definition.calls = OwnCalls(native, definition)
    # If the operator takes structured arguments, the handle flattens them in Python and then calls
    # the OpOverload, whose calls C++ runs.
    if definition.structure is None:
        native.adopt(definition.handle, definition.entry)
