"""Switching operators over to native calls, whenever the extension is there."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchop._compat import handles, libraries, overload_functions, retirement
from torchop._core import contract
from torchop._core.definition import CallPlan
from torchop._core.lock import registration_lock
from torchop._native.extension import api
from torchop._native.plan import make_plan
from torchop._rules.autograd import gradients

if TYPE_CHECKING:
    from torchop._core.definition import Definition


class Reason(enum.IntEnum):
    """Why a call goes to the dispatcher; the order is that of reasons.h."""

    NATIVE = 0
    SWITCHED_OFF = enum.auto()
    OPERATOR = enum.auto()
    BINDING = enum.auto()
    ARGUMENT_TYPE = enum.auto()
    TENSOR_SUBCLASS = enum.auto()
    TANGENT = enum.auto()
    KEYS = enum.auto()
    BACKENDS = enum.auto()
    THREAD = enum.auto()
    PROFILER = enum.auto()
    FUNCTION_MODE = enum.auto()
    AUTOCAST = enum.auto()
    KERNEL = enum.auto()
    MUTATION = enum.auto()
    ANOMALY = enum.auto()
    GRADIENT = enum.auto()


# The extension module, when there is one.
_native: Any = None
# Who else wants to know when it is there.
_waiting: list[Callable[[], None]] = []
# The class of handles, which needs what is here.
handle_type: Any = None


def native_module() -> Any | None:
    """The extension module, if it is loaded."""
    return _native


def start() -> None:
    """What `import torchop` does: nothing, unless the user requires native calls.

    Raises:
        NativeUnavailableError: TORCHOP_NATIVE=require, and the extension cannot be had.
        ValueError: the value of TORCHOP_NATIVE is unknown.
    """
    if api.mode() == "require":
        api.obtain(_ready)


def defined(definition: Definition) -> None:
    """Makes calls of a new operator native, or has that done when the extension is there."""
    if _native is None:
        api.obtain(_ready)  # the first call of this does it, and later ones do nothing
    if _native is not None and definition.entry is None:
        _adopt(definition)


def request(on_ready: Callable[[], None]) -> None:
    """Gets the extension, and calls `on_ready` once when it is there: at once, or later, or never.

    It is called under the lock of registrations, maybe in another thread.
    """
    with registration_lock:
        if _native is None:
            _waiting.append(on_ready)
            api.obtain(_ready)
        else:
            on_ready()


def _ready(module: ModuleType) -> None:
    """Takes the extension over, and switches the operators that were defined before."""
    global _native
    with registration_lock:
        _check_layout(module)
        # Dynamo follows `__call__`, and looks for a property in the very type of an object.
        traceable = {
            name: value
            for name, value in vars(handle_type).items()
            if name == "__call__" or isinstance(value, property)
        }
        module.make_handle_type(handle_type, traceable)
        for cls in overload_functions.forwarding_classes():
            module.shorten_calls(cls)
        contract.is_evidently_fresh = module.is_evidently_fresh
        gradients.are_plain = module.are_plain
        _native = module
        retirement.calls_without_frames.append(lambda: [entry.name for entry in module.running()])
        for handle in handles.published_handles().values():
            if isinstance(handle, handle_type) and handle._definition.reason_gone is None:
                _adopt(handle._definition)
                if handle._definition.has_plan:  # torch.ops may be all that calls it
                    compiled(handle._definition, handle._definition.plan)
        while _waiting:
            _waiting.pop()()


def _check_layout(module: Any) -> None:
    """Shows the extension a kernel that it knows, so that it learns to recognize others.

    Raises:
        ImportError: this PyTorch keeps Python kernels in a way that the extension does not know.
    """
    with libraries.probe_operators() as (name, _, kernel):
        if not module.learn_layout(name, kernel):
            raise ImportError("this PyTorch keeps Python kernels in an unknown way")


class _Calls:
    """The native calls of an operator, which follow its plans."""

    __slots__ = ("_definition", "entry")

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self.entry = _native.Entry(definition.name.packet, functools.partial(_refresh, definition))

    def compiled(self, plan: CallPlan) -> None:
        compiled(self._definition, plan)

    def outdated(self) -> None:
        self.entry.plan = None


def _adopt(definition: Definition) -> None:
    definition.follower = _Calls(definition)
    if definition.structure is None:  # else it calls what torch.ops has, which is native too
        _native.adopt(definition.handle, definition.entry)


def compiled(definition: Definition, plan: CallPlan) -> None:
    """Lets native calls follow a plan that was just compiled; the lock must be held."""
    entry = definition.entry
    if entry is None or definition.reason_gone is not None:
        return
    if entry.dispatch is None:
        # Not at the definition: an OpOverload takes longer to make than all the rest of that.
        entry.dispatch = overload_functions.replace_function(
            definition.overload, _native.Operator, entry
        )
    entry.plan = make_plan(_native, definition, plan)


def _refresh(definition: Definition) -> None:
    """Gives native calls the current plan of an operator; for one that found none."""
    with registration_lock:
        definition.check_defined()
        plan = definition.plan
        entry = definition.entry
        assert entry is not None  # it is what asks
        if entry.plan is None:  # compiled before the extension was there
            compiled(definition, plan)
