"""Native calls of operators that `custom_op` did not define.

torchop does not know the parts of such an operator, or when they change, so it compiles a plan from
the dispatcher's table. Kernels that were registered with torchop are always called natively.
Kernels of other packages are called natively while the operator is accelerated. A plain Python
kernel is called as it is. A kernel of `torch.library.custom_op` is called without its wrappers,
because a native call does the same. Every other call falls back to the dispatcher.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchop import _hooks
from torchop._compat import (
    deregistration,
    foreign_operators,
    inductor_writes,
    libraries,
    operators,
    overload_functions,
    registries,
    torch_ops,
)
from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import find_schema, own_definition
from torchop._native import switch
from torchop._native.extension import api
from torchop._native.plan import NativeCalls, unknown_type
from torchop._native.table import ours
from torchop._schema.naming import OpName

if TYPE_CHECKING:
    from torchop._native._call_path import Entry, Plan

MADE_HERE = "it was defined with torchop, so its calls are native already"

# The accelerated operators.
accelerated: dict[OpName, TableCalls] = {}
# All operators with calls of this kind. An operator's function in `torch.ops` keeps them alive.
_calls: weakref.WeakValueDictionary[OpName, TableCalls] = weakref.WeakValueDictionary()


class TableCalls(NativeCalls):
    """The native calls of an operator that `custom_op` did not define.

    Attributes:
        problem: why the latest plan calls no kernel; None if it calls one.
    """

    __slots__ = ("__weakref__", "_library", "_overload", "problem")

    def __init__(self, native: Any, name: OpName, overload: OpOverload) -> None:
        super().__init__(native, name, find_schema(name))
        self.problem: str | None = None
        self._overload = overload
        self._library: torch.library.Library | None = None
        _calls[name] = self
        self._take_calls(overload)

    def accelerate(self, library: torch.library.Library | None) -> None:
        """Call kernels of other packages natively, until `release` or the end of `library`.

        Args:
            library: the library that defined the operator, if it is known.
        """
        accelerated[self.name] = self
        self._library = library
        foreign_operators.when_exchanged(self._overload, self._take_exchanged)
        if library is not None:
            libraries.on_close(library, self.release)
        self.outdate()

    def release(self) -> None:
        """Undo `accelerate`, except for changes that somebody else has changed again."""
        with registration_lock:
            if accelerated.get(self.name) is not self:
                return
            del accelerated[self.name]
            foreign_operators.forget_exchange(self._overload)
            if not (_may_take(self.name) and ours.registered_kernels(self._native, self.name)):
                operator = self._native.Operator
                foreign_operators.restore_function(self._overload, operator, self.entry)
            if self._library is not None:
                libraries.forget_hook(self._library, self.release)
                self._library = None
            self.outdate()

    def _take_exchanged(self) -> None:
        """Replace the function of the overload again, which PyTorch has just replaced."""
        if overload_functions.is_cpp_function(overload_functions.replaced_function(self._overload)):
            self._take_calls(self._overload)

    def _compile(self) -> Plan:
        """Compile a plan from the current table."""
        from torchop._native.table import gradients, others  # start-up time: used by the first call

        native, name, overload, schema = self._native, self.name, self._overload, self._schema
        if accelerated.get(name) is self and not has_own_kernels(native, name):
            kernels, self.problem = others.find_kernels(native, name, overload, schema)
        else:
            # A plan has one check of results, so it does not mix these kernels with others.
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
            # A library that closes may uncover a kernel that this plan does not know.
            is_foreign=True,
            as_dispatched=kernels.as_dispatched,
        )
        if kernels.pairs and plan.unknown_parameter is not None:
            self.problem = unknown_type(schema, plan)
        return plan


def has_own_kernels(native: Any, name: OpName) -> bool:
    """Return whether a kernel at a backend key was registered with torchop.

    A torchop kernel at an Autograd key may redispatch to a kernel of another package.
    """
    return bool(ours.registered_kernels(native, name, [ours.BACKEND]))


def is_made_here(name: OpName) -> bool:
    """Return whether calls of an operator are native without an acceleration."""
    native = switch.native_module()
    return own_definition(None, name) is not None or (
        native is not None and has_own_kernels(native, name)
    )


def accelerate(name: OpName, library: torch.library.Library | None) -> str | None:
    """Make calls of another package's operator native; otherwise return why they cannot be.

    Args:
        name: the operator.
        library: the library that defined it, if it is known.
    """
    with registration_lock:
        native = switch.native_module()
        if native is None:
            return api.why_missing()
        _shorten_handle_calls(native)
        overload = torch_ops.live_overload(*name)
        if overload is None:
            return "it is gone"
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
                return "something replaced the function that its object in torch.ops calls"
            calls = TableCalls(native, name, overload)
        calls.accelerate(library)
        if overload._schema.is_mutable:
            inductor_writes.register_lowerings(str(name))
        return None


def release(name: OpName) -> None:
    """Undo the acceleration of an operator, if it is accelerated."""
    calls = accelerated.get(name)
    if calls is not None:
        calls.release()


@functools.cache
def _shorten_handle_calls(native: Any) -> None:
    if foreign_operators.handle_calls_forward() and overload_functions.forwarding_classes():
        native.shorten_handle_calls(CustomOpDef)


def calls_of(name: OpName) -> TableCalls | None:
    """Return the native calls of an operator that `custom_op` did not define, if there are any."""
    if (calls := accelerated.get(name) or _calls.get(name)) is None:
        return None
    return calls if name in accelerated or entry_of(name) is calls.entry else None


def entry_of(name: OpName) -> Entry | None:
    """Return the entry of native calls through `torch.ops`, if there is one."""
    native, overload = switch.native_module(), torch_ops.existing_overload(*name)
    if native is None or overload is None:
        return None
    function = overload_functions.replaced_function(overload)
    return function.entry if isinstance(function, native.Operator) else None


def outdate(name: OpName) -> None:
    """Make the next native call of an operator compile a new plan."""
    entry = entry_of(name)
    if entry is not None:
        entry.plan = None


def attach(name: OpName, overload: OpOverload) -> None:
    """Make calls natively that end at a kernel which was registered with torchop.

    This includes the other overloads in the packet, which PyTorch tries in turn. Called when such a
    kernel first runs, because the operator is complete by then, and used. Called again for a kernel
    that was registered later and is not in the plan.
    """
    if not _may_take(name):
        return

    parsed = overload._schema

    def take_calls() -> None:
        current = torch_ops.existing_overload(*name)
        if current is not overload or current._schema is not parsed:
            return  # the operator was deregistered, or the overload belongs to the next operator
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
    # Not an operator of PyTorch in which somebody overrides a kernel.
    qualname = str(name)
    return operators.is_defined_in_python(qualname) and not registries.published_handle(qualname)


class Follower:
    """Makes calls native that run the registrations of a definition, and renews their plan."""

    __slots__ = ("_name",)

    def __init__(self, definition: Definition) -> None:
        self._name = definition.name

    def attach(self) -> None:
        """Make calls native, unless another package defined the operator.

        Such an operator may have kernels of the other package, so it is left to `accelerate`.
        """
        name = self._name
        if name.packet in deregistration.defined and entry_of(name) is None:
            overload = torch_ops.existing_overload(*name) or torch_ops.live_overload(*name)
            if overload is not None:
                attach(name, overload)

    def outdate(self) -> None:
        """Make the next native call compile a new plan."""
        outdate(self._name)


_hooks.new_follower = Follower
