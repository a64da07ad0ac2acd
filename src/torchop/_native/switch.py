"""Switches operators over to native calls when the extension is loaded."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torchop import _hooks
from torchop._compat import (
    autograd,
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


# The extension module, when there is one.
_native: Any = None
# What `request` calls when it is there.
_waiting: list[Callable[[], None]] = []
# The type that a native handle changes to, once it is made. That can be done only once.
_native_handle_types: list[type] = []


def native_module() -> Any | None:
    """The extension module, if it is loaded."""
    return _native


def start() -> None:
    """What `import torchop` does: nothing, unless TORCHOP_NATIVE requires native calls.

    A wrong value raises where the first operator is made, and not here, because the command line
    imports this before it can say what is wrong in one line.
    """
    if os.environ.get("TORCHOP_NATIVE") == "require":
        obtain()


def obtain() -> None:
    """Gets the extension; only the first call does anything, unless it raises.

    Nor does one in a trace of TorchScript, which runs a function twice, and compares from which
    lines of Python operators are called.
    """
    if (_native is None or not _first_use.is_over) and not compilers.torchscript_is_tracing():
        _obtain()


def _obtain() -> None:
    api.extension.obtain(_ready)
    _first_use.end()


def _obtain_for_dynamo() -> None:
    """Gets the extension at the end of Dynamo's import, which cannot be repeated if it fails."""
    try:
        _obtain()
    except NativeBuildWarning as problem:  # a warning that the user made an error
        log.warning("%s", problem)
    except RecursionError:
        pass  # the next use tries again


def wait(timeout: float | None = None) -> bool:
    """Gets the extension, and waits for it if it is compiled; returns whether it is there."""
    is_there = api.extension.wait(_ready, timeout)
    _first_use.end()
    return is_there


class _FirstUse:
    """Gets the extension when an operator is first used: follows those that are not native yet.

    Programs import packages that define hundreds of operators, and call none of them: to show their
    options, or to build their documentation. They have nothing to load or to compile.
    """

    def __init__(self) -> None:
        self.is_over = False
        # `__call__` of handles, and what waits in its place.
        self.call: Callable[..., Any] | None = None
        self._first_call: Callable[..., Any] | None = None

    def wait(self) -> None:
        """Waits for the first call, through a handle or `torch.ops`, and for Dynamo."""
        if self._first_call is not None or self.is_over:
            return
        api.mode()  # raises an exception if the environment variable is wrong
        # Its guards hold on to the type of a handle, which must not change during a trace.
        import_hooks.when_imported(compilers.DYNAMO, _obtain_for_dynamo)
        call = self.call = _hooks.handle_type.__call__

        @functools.wraps(call)
        def first_call(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
            obtain()
            # Not `handle(...)` for others: whoever replaced `__call__` may have this one called.
            is_native = type(handle) in _native_handle_types
            return handle(*args, **kwargs) if is_native else call(handle, *args, **kwargs)

        if not self.is_over:  # as it is where Dynamo was imported already
            self._first_call = _hooks.handle_type.__call__ = first_call

    def end(self) -> None:
        """Lets calls of handles go their way."""
        with registration_lock:
            # Unless somebody else has replaced it.
            if _hooks.handle_type.__call__ is self._first_call:
                _hooks.handle_type.__call__ = self.call
            self.is_over = True

    def attach(self) -> None:
        """Called when the plan of an operator is compiled, as for a call through `torch.ops`."""
        obtain()

    def outdate(self) -> None:
        """Called when a plan is stale, which says nothing about a call."""


_first_use = _FirstUse()


def new_handle_type() -> Any:
    """The type of handles to be made: the native one, if the extension is there."""
    return _hooks.handle_type if _native is None else _native_handle_types[0]


def make_native(definition: Definition) -> None:
    """Makes calls of a new operator native, or has that done when the extension is there."""
    if _native is None:
        definition.follower = _first_use
        _first_use.wait()
    if _native is not None and definition.entry is None:
        _adopt(definition, _native)


def request(on_ready: Callable[[], None]) -> None:
    """Gets the extension, and calls `on_ready` once when it is there: at once, or later, or never.

    That call holds the registration lock, and may be in another thread.
    """
    with registration_lock:
        obtain()
        if _native is not None:
            on_ready()
        elif api.status().state not in ("off", "failed"):
            _waiting.append(on_ready)


def _ready(module: ModuleType) -> None:
    """Receives the extension, and makes calls of operators that were defined before native.

    If it raises, as a warning that the user made an error does, it is called again.
    """
    global _native
    with registration_lock:
        if _native is None:
            _prepare(module)
            for handle in registries.published_handles().values():
                if isinstance(handle, Handle) and handle._definition.reason_gone is None:
                    calls = _adopt(handle._definition, module)
                    if handle._definition.has_plan:  # torch.ops may be all that calls it
                        calls.attach()
                        if handle._definition.rule(rule.KernelRule).providers is not None:
                            handle._definition.outdate_plan()  # it chooses in Python
            _native = module  # last: until then, whoever asks for the extension comes here
        while _waiting:
            _waiting[-1]()
            _waiting.pop()


def _prepare(module: ModuleType) -> None:
    """Connects the extension with PyTorch, Dynamo and the rules; may be called again."""
    # From a kernel that it is shown, the extension learns to recognize others.
    with libraries.probe_operators() as probes:
        if not module.learn_kernels(*probes):
            raise ImportError(
                "torchop does not know how this release of PyTorch stores Python kernels"
            )
    if not _native_handle_types:
        # Dynamo follows `__call__`, and looks for a property in the very type of an object.
        base = _hooks.handle_type
        members = vars(base).items()
        traceable: dict[str, Any] = {k: v for k, v in members if isinstance(v, property)}
        traceable["__call__"] = _first_use.call or base.__call__
        _native_handle_types.append(module.make_handle_type(base, traceable))
    dynamo_variables.trace_as_overload(_native_handle_types[0])
    for cls in overload_functions.forwarding_classes():
        module.shorten_calls(cls, _before_first_call)
    recipe.difference = module.try_nodes(autograd.make_autograd_function, autograd.node_maker)
    if (problem := recipe.unknown_nodes()) is not None:
        log.warning("Calls that record a gradient go through the dispatcher: %s.", problem)
    type(registration_lock).__enter__ = module.make_entering(registration_lock)
    _hooks.extension = module


def _before_first_call(op: OpOverload | OpOverloadPacket) -> None:
    """Has the calls of an object of `torch.ops` counted before it is first called.

    PyTorch's own function does not count them, so whoever ends the operator, in another thread,
    would not wait for those that are in the dispatcher. A call of another operator does not wait
    for registrations: these would not wait for the kernel that makes it.
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
