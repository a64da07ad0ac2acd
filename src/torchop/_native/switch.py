"""Make calls of operators native once the extension is loaded."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torchop import _hooks
from torchop._compat import (
    compilers,
    deregistration,
    dynamo_variables,
    import_hooks,
    libraries,
    overload_functions,
    registries,
)
from torchop._compat.classes import OpOverload, OpOverloadPacket
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import Handle
from torchop._errors import NativeBuildWarning
from torchop._native.extension import api, recipe
from torchop._native.plan import OwnCalls
from torchop._rules.kernels import rule

log = logging.getLogger(__name__)


# The extension module, set after all existing operators were made native.
_native: Any = None
# Callbacks passed to `request`, to call after loading.
_waiting: list[Callable[[], None]] = []
# The native subclass of the class of handles, at most one: the extension can only create it once.
_native_handle_types: list[type] = []


def native_module() -> Any | None:
    """Return the extension module, or None if it is not loaded."""
    return _native


def start() -> None:
    """Load the extension during `import torchop` if TORCHOP_NATIVE=require.

    An invalid value raises when the first operator is defined, and not here, because the command
    line imports torchop before it can report the error in one line.
    """
    if os.environ.get("TORCHOP_NATIVE") == "require":
        obtain()


def obtain() -> None:
    """Load the extension, or start to compile it. Calls after the first successful one do nothing.

    Does nothing in a trace of TorchScript, which runs a function twice and compares the Python
    lines that call operators.
    """
    if (_native is None or not _first_use.is_over) and not compilers.torchscript_is_tracing():
        _obtain()


def _obtain() -> None:
    api.extension.obtain(_ready)
    _first_use.end()


def _obtain_for_dynamo() -> None:
    """Load the extension at the end of Dynamo's import, which would break if this raised."""
    try:
        _obtain()
    except NativeBuildWarning as problem:  # a warning that the user made an error
        log.warning("%s", problem)
    except RecursionError:
        pass  # the next first use tries again


def wait(timeout: float | None = None) -> bool:
    """Load the extension, wait while it is compiled, and return whether it is loaded."""
    is_there = api.extension.wait(_ready, timeout)
    _first_use.end()
    return is_there


class _FirstUse:
    """The `Follower` of all definitions until the extension is loaded, on the first use of an
    operator.

    A program may import a package with hundreds of operators and call none, for example to print
    its options or to build documentation. Importing must not load or compile the extension.
    """

    def __init__(self) -> None:
        self.is_over = False
        # `__call__` of handles, and its replacement until the first call.
        self.call: Callable[..., Any] | None = None
        self._first_call: Callable[..., Any] | None = None

    def wait(self) -> None:
        """Load the extension at the first call of an operator, or when Dynamo is imported."""
        if self._first_call is not None or self.is_over:
            return
        api.mode()  # raises an exception if the environment variable is invalid
        # Dynamo's guards compare the type of a handle, which must not change during a trace.
        import_hooks.when_imported(compilers.DYNAMO, _obtain_for_dynamo)
        call = self.call = _hooks.handle_type.__call__

        @functools.wraps(call)
        def first_call(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
            obtain()
            # Not always `handle(...)`: a replacement of `__call__` may call this function.
            is_native = type(handle) in _native_handle_types
            return handle(*args, **kwargs) if is_native else call(handle, *args, **kwargs)

        if not self.is_over:  # already over if Dynamo was imported before
            self._first_call = _hooks.handle_type.__call__ = first_call

    def end(self) -> None:
        """Restore `__call__` of handles."""
        with registration_lock:
            # Do not overwrite a replacement that other code installed.
            if _hooks.handle_type.__call__ is self._first_call:
                _hooks.handle_type.__call__ = self.call
            self.is_over = True

    def attach(self) -> None:
        """Load the extension for a call through `torch.ops`, which compiles the plan."""
        obtain()

    def outdate(self) -> None:
        """Do nothing: invalidating a plan is not a use of the operator."""


_first_use = _FirstUse()


def new_handle_type() -> Any:
    """Return the type for a new handle: the native one if the extension is loaded."""
    return _hooks.handle_type if _native is None else _native_handle_types[0]


def make_native(definition: Definition) -> None:
    """Make calls of a new operator native, now or when the extension is loaded."""
    if _native is None:
        definition.follower = _first_use
        _first_use.wait()
    if _native is not None and definition.entry is None:
        _adopt(definition, _native)


def request(on_ready: Callable[[], None]) -> None:
    """Load the extension, and call `on_ready` after it is loaded.

    `on_ready` is called with `registration_lock` held, perhaps in another thread, and never if
    loading fails.
    """
    with registration_lock:
        obtain()
        if _native is not None:
            on_ready()
        elif api.status().state not in ("off", "failed"):
            _waiting.append(on_ready)


def _ready(module: ModuleType) -> None:
    """Make calls of existing operators native, after the extension was loaded.

    Called again if it raises, for example because a warning is an error.
    """
    global _native
    with registration_lock:
        if _native is None:
            _prepare(module)
            for handle in registries.published_handles().values():
                if isinstance(handle, Handle) and handle._definition.deregistration_reason is None:
                    calls = _adopt(handle._definition, module)
                    if handle._definition.has_plan:  # calls may only come through torch.ops
                        calls.attach()
                        if handle._definition.rule(rule.KernelRule).providers is not None:
                            handle._definition.outdate_plan()  # the old plan selects in Python
            _native = module  # last: until then, `obtain` calls this function again
        while _waiting:
            _waiting[-1]()
            _waiting.pop()


def _prepare(module: ModuleType) -> None:
    """Connect the extension with PyTorch, Dynamo and the layers below; safe to repeat."""
    # From two operators with known kernels, the extension finds the layout of Python kernels.
    with libraries.probe_operators() as probes:
        if not module.learn_kernels(*probes):
            raise ImportError(
                "this version of torchop does not support how this PyTorch stores Python kernels"
            )
    if not _native_handle_types:
        # Dynamo traces `__call__`, and looks up properties in the type itself, not in its bases.
        base = _hooks.handle_type
        members = vars(base).items()
        traceable: dict[str, Any] = {k: v for k, v in members if isinstance(v, property)}
        traceable["__call__"] = _first_use.call or base.__call__
        _native_handle_types.append(module.make_handle_type(base, traceable))
    dynamo_variables.trace_as_overload(_native_handle_types[0])
    for cls in overload_functions.forwarding_classes():
        module.shorten_calls(cls, _before_first_call)
    if (problem := recipe.unknown_nodes()) is not None:
        log.warning("Calls that record a gradient go through the dispatcher: %s.", problem)
    type(registration_lock).__enter__ = module.make_entering(registration_lock)
    _hooks.extension = module


def _before_first_call(op: OpOverload | OpOverloadPacket) -> None:
    """Count the calls of an object of `torch.ops` from its first call on.

    Another thread that deregisters the operator waits for calls in the dispatcher, but PyTorch's
    own function does not count them. Calls of operators that torchop did not define are not
    counted: a registration must not wait for the kernel that makes such a call.
    """
    packet = vars(op).get("_overloadpacket", op)
    if vars(packet).get("_qualified_op_name") in deregistration.defined:
        with registration_lock:
            deregistration.count_calls(op)


def _adopt(definition: Definition, native: Any) -> OwnCalls:
    calls = definition.follower
    if not isinstance(calls, OwnCalls):
        calls = definition.follower = OwnCalls(native, definition)
    if definition.structure is None:  # a structured handle calls torch.ops, which is native too
        native.adopt(definition.handle, calls.entry)
    return calls
