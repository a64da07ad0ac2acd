"""Native calls to operators that `torchop.custom_op` did not create.

Any package may register kernels for such an operator, so torchop compiles call plans from the
dispatcher's table of kernels. Whether a call is native (runs without the dispatcher) depends on the
kernel:

- If the kernel was registered with torchop, for example with `Library.impl`, calls are always
  native.
- If another package registered a Python kernel, calls are native while `torchop.accelerate` applies
  to the operator. For kernels from `torch.library.custom_op`, a native call skips PyTorch's
  wrappers around the kernel and does their work itself.
- All other calls go through the dispatcher.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchop import _hooks
from torchop._compat import (
    dispatch,
    foreign_operators,
    inductor_writes,
    operators,
    overload_functions,
    registries,
    torch_ops,
)
from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registered import Registrations, registrations_of
from torchop._core.registry import find_schema, own_definition
from torchop._native import switch
from torchop._native.extension import api
from torchop._native.plan import NativeCalls, unknown_type
from torchop._native.table import ours
from torchop._rules.functionalization import rule as functionalization
from torchop._schema.naming import OpName

if TYPE_CHECKING:
    from torchop._native._call_path import Entry, Plan

_KIND = "acceleration"  # the key in the table of registrations
MADE_HERE = "it was defined with torchop, so its calls are native already"

# The operators of other packages that `torchop.accelerate` has accelerated.
accelerated: dict[OpName, TableCalls] = {}
# Maps the names of operators to all TableCalls objects that are still alive. The function in
# `OpOverload._op` keeps the TableCalls object of its operator alive.
_calls: weakref.WeakValueDictionary[OpName, TableCalls] = weakref.WeakValueDictionary()


class TableCalls(NativeCalls):
    __slots__ = ("__weakref__", "_overload", "_registered", "_table", "problem")

    def __init__(self, native: Any, name: OpName, overload: OpOverload) -> None:
        super().__init__(native, name, find_schema(name))
        self.problem: str | None = None  # why the latest plan has no kernel
        self._overload = overload
        self._registered = Registrations(str(name))
        # `accelerate` adds its undo function to these registrations. If the library that defined
        # the operator is known, they are the library's registrations, so closing the library also
        # undoes `accelerate`.
        self._table = Registrations(str(name))
        _calls[name] = self
        self._take_calls(overload)

    def accelerate(self, library: torch.library.Library | None) -> None:
        """Let C++ run other packages' kernels without the dispatcher, until `release` is called.

        `library` is the library that defined the operator, or None if it is unknown. Closing this
        library has the same effect as `release`.
        """
        if library is not None:
            self._table = registrations_of(library, self.name)
        accelerated[self.name] = self  # first, because `add` calls `_release` if it raises
        self._table.add(_KIND, self, self._release)
        if self._overload._schema.is_mutable:
            functionalization.install_low_level(self._registered, is_mutable=True)
        foreign_operators.when_exchanged(self._overload, self._take_exchanged)
        self.outdate()

    def release(self) -> None:
        """Undo `accelerate`. Leave `OpOverload._op` unchanged if other code has replaced it."""
        with registration_lock:
            self._table.remove(_KIND)

    def _release(self) -> None:
        del accelerated[self.name]
        self._registered.remove_all()
        foreign_operators.forget_exchange(self._overload)
        if not (_may_take(self.name) and ours.registered_kernels(self._native, self.name)):
            operator = self._native.Operator
            foreign_operators.restore_function(self._overload, operator, self.entry)
        self.outdate()

    def _take_exchanged(self) -> None:
        if overload_functions.is_cpp_function(overload_functions.replaced_function(self._overload)):
            self._take_calls(self._overload)

    def _compile(self) -> Plan:
        from torchop._native.table import gradients, others  # only needed once operators are called

        native, name, overload, schema = self._native, self.name, self._overload, self._schema
        if accelerated.get(name) is self and not has_own_kernels(native, name):
            kernels, self.problem = others.find_kernels(native, name, overload, schema)
        else:
            # Use only torchop's kernels. Other packages' kernels need a different check of results,
            # and a call plan can have only one.
            kernels, self.problem = ours.find_kernels(native, name, schema), None
        autograd_kernel, gradient, sources = gradients.find(native, name, overload, schema)
        sources = (*kernels.sources, *sources, *foreign_operators.dispatcher_source(overload))
        plan = self._plan(
            kernels=kernels.pairs,
            own_kernels=(autograd_kernel, others.version_counter(native, name, overload), None),
            returned_parameters=kernels.returned_parameters,
            are_fresh=kernels.are_fresh,
            gradient=gradient,
            finish=kernels.finish,
            convert=kernels.convert,
            sources=sources if kernels.pairs else (),
            is_foreign=True,  # other packages may register kernels at any time
            as_dispatched=kernels.as_dispatched,
        )
        if kernels.pairs and plan.unknown_parameter is not None:
            self.problem = unknown_type(schema, plan)
        return plan


def has_own_kernels(native: Any, name: OpName) -> bool:
    """Return whether torchop registered a kernel at the dispatch key of a backend, such as "CPU".

    Kernels at Autograd keys are ignored, because they may redispatch to another package's kernel.
    """
    return bool(ours.registered_kernels(native, name, [ours.BACKEND]))


def is_made_here(name: OpName) -> bool:
    native = switch.native_module()
    return own_definition(None, name) is not None or (
        native is not None and has_own_kernels(native, name)
    )


def accelerate(name: OpName, library: torch.library.Library | None) -> str | None:
    problem = _accelerate(name, library)
    overload = torch_ops.existing_overload(*name)
    if problem is None and overload is not None and overload._schema.is_mutable:
        inductor_writes.register_lowerings(str(name))  # not under the lock, because it may import
    return problem


def _accelerate(name: OpName, library: torch.library.Library | None) -> str | None:
    with registration_lock:
        native = switch.native_module()
        overload = torch_ops.live_overload(*name)
        if native is None:
            if overload is not None:
                _count_calls(name, overload)
            return api.why_missing()
        _patch_handle_calls(native)
        if overload is None:
            return "it was deregistered"
        overload_functions.stop_observing(overload)
        calls = accelerated.get(name)
        if calls is not None and calls._overload is overload:
            return calls.problem
        release(name)
        if is_made_here(name):
            return MADE_HERE
        calls = calls_of(name)
        if calls is None:
            function = overload_functions.replaced_function(overload)
            if not overload_functions.is_cpp_function(function):
                return "other code replaced its function in torch.ops"
            calls = TableCalls(native, name, overload)
        calls.accelerate(library)
        return None


def _count_calls(name: OpName, overload: OpOverload) -> None:
    """Count calls as `switch.count_call` does, if the extension is not compiled yet.

    torchop's kernels count their calls themselves. Other packages' kernels do not, so count when
    the overload or packet is called. Calls under a mode are ignored, because they always go through
    the dispatcher.
    """
    if _hooks.count_call is None or name.packet in torch_ops.defined:
        return

    def observe() -> bool:
        if _hooks.count_call is not None and not dispatch.dispatch_modes_are_active():
            _hooks.count_call()
        return _hooks.count_call is not None

    overload_functions.stop_observing(overload)
    overload_functions.observe_calls(overload, observe)
    foreign_operators.when_exchanged(overload, functools.partial(_count_calls, name, overload))


def release(name: OpName) -> None:
    calls = accelerated.get(name)
    if calls is not None:
        calls.release()
    elif (overload := torch_ops.existing_overload(*name)) is not None:
        overload_functions.stop_observing(overload)


@functools.cache
def _patch_handle_calls(native: Any) -> None:
    if foreign_operators.handle_calls_forward() and overload_functions.forwarding_classes():
        native.patch_handle_calls(CustomOpDef)


def calls_of(name: OpName) -> TableCalls | None:
    if (calls := accelerated.get(name) or _calls.get(name)) is None:
        return None
    return calls if name in accelerated or entry_of(name) is calls.entry else None


def entry_of(name: OpName) -> Entry | None:
    """Return the C++ object that handles calls made through `torch.ops`, or None."""
    native, overload = switch.native_module(), torch_ops.existing_overload(*name)
    if native is None or overload is None:
        return None
    function = overload_functions.replaced_function(overload)
    return function.entry if isinstance(function, native.Operator) else None


def outdate(name: OpName) -> None:
    calls = calls_of(name)
    if calls is not None:
        calls.outdate()
    elif (entry := entry_of(name)) is not None:
        entry.plan = None


def attach(name: OpName, overload: OpOverload) -> None:
    """Let C++ run calls to an operator whose kernels were registered with torchop.

    A kernel calls this function when it runs for the first time, because by then the operator is
    complete and in use. A call to the packet tries the overloads in order, and C++ can run this
    call only if it also receives the calls to the earlier overloads. So this function also lets C++
    run calls to the other overloads.
    """
    if not _may_take(name):
        return

    parsed = overload._schema

    def take_calls() -> None:
        with registration_lock:
            take()

    def take() -> None:
        current = torch_ops.existing_overload(*name)
        if current is not overload or current._schema is not parsed:
            return  # the operator was deregistered or redefined in the meantime
        native = switch.native_module()
        if entry_of(name) is None:
            TableCalls(native, name, overload)
        else:
            outdate(name)
        for sibling in torch_ops.other_overloads(overload):
            other = OpName(name.namespace, name.name, sibling)
            if (
                _may_take(other)
                and entry_of(other) is None
                and ours.registered_kernels(native, other)
            ):
                TableCalls(native, other, torch_ops.lookup_overload(*other))

    switch.request(take_calls)


def _may_take(name: OpName) -> bool:
    # Exclude operators that are defined in C++, such as PyTorch's own, even if torchop has
    # registered a kernel for one of these operators.
    qualname = str(name)
    return operators.is_defined_in_python(qualname) and not registries.published_handle(qualname)


def _before_plan(definition: Definition) -> None:
    """Let C++ bypass the dispatcher for an operator that was defined through torchop.

    If another package defined the operator, that package may have registered kernels, so C++ runs
    calls only if the user calls `torchop.accelerate`.
    """
    name = definition.name
    if definition.calls is not None:
        definition.calls.attach()
    elif definition.is_ours:
        switch.obtain()
    elif name.packet in torch_ops.defined and entry_of(name) is None:
        overload = torch_ops.existing_overload(*name) or torch_ops.live_overload(*name)
        if overload is not None:
            attach(name, overload)


def _plan_outdated(definition: Definition) -> None:
    if definition.calls is not None:
        definition.calls.outdate()
    elif not definition.is_ours:
        outdate(definition.name)


_hooks.before_plan = _before_plan
_hooks.plan_outdated = _plan_outdated
