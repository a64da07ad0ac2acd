"""Switches operators over to native calls when the extension is loaded."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchop._compat import (
    compilers,
    dynamo_variables,
    handles,
    import_hooks,
    libraries,
    overload_functions,
    retirement,
)
from torchop._core import contract
from torchop._core.definition import CallPlan, Definition
from torchop._core.lock import registration_lock
from torchop._native.extension import api, recipe
from torchop._native.plan import NativeCalls, converting, is_returnable, mutated_parameters
from torchop._rules.autograd import gradients
from torchop._rules.autograd.derived import replay
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.forms import Form

if TYPE_CHECKING:
    from torchop._native._call_path import Plan


log = logging.getLogger(__name__)


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
# What `request` calls when it is there.
_waiting: list[Callable[[], None]] = []
# The class of handles, which puts itself here: it is defined above this package.
handle_type: Any = None


def native_module() -> Any | None:
    """The extension module, if it is loaded."""
    return _native


def start() -> None:
    """What `import torchop` does: nothing, unless TORCHOP_NATIVE requires native calls."""
    if api.mode() == "require":
        obtain()


def obtain() -> None:
    """Gets the extension; only the first call does anything."""
    if _native is None:
        api.obtain(_ready)
        _first_use.end()  # unless an exception interrupted it


class _FirstUse:
    """Gets the extension when an operator is first used: follows those that are not native yet.

    Programs import packages that define hundreds of operators, and call none of them: to show their
    options, or to build their documentation. They have nothing to load or to compile.
    """

    def __init__(self) -> None:
        self.call: Callable[..., Any] | None = None  # of handles, while another waits in its place
        self._is_over = False

    def wait(self) -> None:
        """Waits for the first call, through a handle or `torch.ops`, and for Dynamo."""
        if self._is_over or self.call is not None:
            return
        call = self.call = handle_type.__call__

        @functools.wraps(call)
        def first_call(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
            obtain()
            return handle(*args, **kwargs)  # native, if the extension is there by now

        handle_type.__call__ = first_call
        # Its guards hold on to the type of a handle, which must not change during a trace.
        import_hooks.when_imported(compilers.DYNAMO, obtain)

    def end(self) -> None:
        """Lets calls of handles go their way."""
        self._is_over = True
        if self.call is not None:
            handle_type.__call__, self.call = self.call, None

    def attach(self) -> None:
        """Called when the plan of an operator is compiled, as for a call through `torch.ops`."""
        obtain()

    def outdate(self) -> None:
        """Called when a plan is stale, which says nothing about a call."""


_first_use = _FirstUse()


def make_native(definition: Definition) -> None:
    """Makes calls of a new operator native, or has that done when the extension is there."""
    if _native is None:
        definition.follower = _first_use
        _first_use.wait()
    elif definition.entry is None:
        _adopt(definition)


def request(on_ready: Callable[[], None]) -> None:
    """Gets the extension, and calls `on_ready` once when it is there: at once, or later, or never.

    That call holds the registration lock, and may be in another thread.
    """
    with registration_lock:
        if _native is not None:
            on_ready()
            return
        _waiting.append(on_ready)
        obtain()
        if api.status().state in ("off", "failed"):
            _waiting.clear()


def _ready(module: ModuleType) -> None:
    """Receives the extension, and makes calls of operators that were defined before native."""
    global _native
    with registration_lock:
        # From a kernel that it is shown, the extension learns to recognize others.
        with libraries.probe_operators() as (name, _, kernel):
            if not module.learn_layout(name, kernel):
                raise ImportError(
                    "torchop does not know how this release of PyTorch stores Python kernels"
                )
        # Dynamo follows `__call__`, and looks for a property in the very type of an object.
        traceable: dict[str, Any] = {
            name: value for name, value in vars(handle_type).items() if isinstance(value, property)
        }
        traceable["__call__"] = _first_use.call or handle_type.__call__
        dynamo_variables.trace_as_overload(module.make_handle_type(handle_type, traceable))
        for cls in overload_functions.forwarding_classes():
            module.shorten_calls(cls)
        contract.is_evidently_fresh = module.is_evidently_fresh
        gradients.are_plain = module.are_plain
        replay.pack_on_cpu = module.pack_on_cpu
        _native = module
        _log_unknown_nodes()
        retirement.calls_without_frames.append(lambda: [entry.name for entry in module.running()])
        for handle in handles.published_handles().values():
            if isinstance(handle, handle_type) and handle._definition.reason_gone is None:
                calls = _adopt(handle._definition)
                if handle._definition.has_plan:  # torch.ops may be all that calls it
                    calls.attach()
        while _waiting:
            _waiting.pop()()


def _log_unknown_nodes() -> None:
    problem = recipe.unknown_nodes()
    if problem is not None:
        log.warning("Calls that record a gradient go through the dispatcher: %s.", problem)


def _adopt(definition: Definition) -> OwnCalls:
    calls = definition.follower = OwnCalls(_native, definition)
    if definition.structure is None:  # a structured handle calls torch.ops, which is native too
        _native.adopt(definition.handle, calls.entry)
    return calls


class OwnCalls(NativeCalls):
    """The native calls of an operator of ours, compiled from its plan."""

    __slots__ = ("_definition",)

    def __init__(self, native: Any, definition: Definition) -> None:
        super().__init__(native, definition.name, definition.schema)
        self._definition = definition

    def attach(self) -> None:
        """Makes calls through `torch.ops` native too; the registration lock must be held.

        Done when the operator is first used: an `OpOverload` takes longer to make than all the rest
        of a definition.
        """
        definition = self._definition
        if self.entry.dispatch is None and definition.reason_gone is None:
            self._take_calls(definition.overload)
            self._bypass_kernels()

    def _bypass_kernels(self) -> None:
        """Makes the dispatcher skip those of our Python kernels that have nothing to do."""
        definition = self._definition
        name = definition.name
        for key in ("Autograd", "ADInplaceOrView"):
            kernel = definition.dispatcher_kernels.get(key)
            bypass = self._native.bypass(name.packet, name.overload, key, kernel)
            if bypass is not None:
                libraries.on_close(definition.library, [bypass].clear)

    def _compile(self) -> Plan:
        definition = self._definition
        definition.check_defined()
        plan = definition.plan
        self.attach()  # for a plan that was compiled before the extension was there
        return self.compiled(plan)

    def compiled(self, plan: CallPlan) -> Plan:
        """Compiles the plan of the operator for native calls."""
        definition, schema = self._definition, self._schema
        kernels = plan[KernelRule]
        dispatched = definition.dispatcher_kernels
        is_plain = schema.form is Form.PLAIN
        return self._plan(
            kernels=tuple(
                (dispatched[key], kernels.functions[device])
                for key, device in definition.rule(KernelRule).installed.items()
                if device in kernels.functions and is_returnable(schema)
            ),
            own_kernels=(
                dispatched.get("Autograd"),
                dispatched.get("ADInplaceOrView"),
                dispatched.get("BackendSelect"),
            ),
            returned_parameters=() if is_plain else mutated_parameters(schema),
            are_fresh=kernels.outputs_are_fresh and not kernels.returns_arguments,
            gradient=_gradient(definition, plan),
            finish=converting(functools.partial(kernels.finish, definition), schema),
        )


def _gradient(definition: Definition, plan: CallPlan) -> tuple[Any, ...] | str:
    """The gradient of a `Plan`, as in `_call_path.pyi`; or why the dispatcher records gradients."""
    schema, formula = plan.schema, plan[AutogradRule]
    if schema.form is not Form.PLAIN:
        return "it rebases the history of the tensors that the operator mutates"
    if not formula.is_native:
        return "its formula is derived, and keeps the graph of the body"
    # It is made when a call first records a gradient.
    function = definition.rule(AutogradRule).cached_function
    if function is None:
        return "the first call that records one is never native, but later ones are"
    if formula.native_steps is not None:
        look, save = formula.native_steps
        return function, save, None, look
    return function, formula.setup_context
