"""Native calls of operators that were defined and implemented at the low level."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torchop._compat import operators, overload_functions, registries, torch_ops
from torchop._compat.classes import OpOverload
from torchop._core.checking import checked
from torchop._core.contract import result_check
from torchop._core.registry import find_schema
from torchop._native import switch
from torchop._native.plan import NativeCalls, converting, is_returnable
from torchop._schema.naming import OpName

if TYPE_CHECKING:
    from torchop._native._call_path import Entry, Plan

# Where a kernel may stand at which a call ends: at a backend, or at Autograd for it. One at
# Autograd records the gradient itself, and hands the call on if it has to, so it is called like any
# other.
BACKEND, AUTOGRAD = "", "Autograd"  # what the names of these keys begin with

# Called with the name of an operator before its calls are taken here, so that an acceleration
# releases it.
release_hooks: list[Callable[[OpName], None]] = []

# What `Library.impl` registers is a wrapper that checks results; this is the function inside.
KERNEL_ATTRIBUTE = "_torchop_kernel"


class LowLevelCalls(NativeCalls):
    """The native calls of an operator whose kernels `Library.impl` registered."""

    __slots__ = ("_check",)

    def __init__(self, native: Any, name: OpName, overload: OpOverload) -> None:
        super().__init__(native, name, find_schema(name))
        self._check = result_check(self._schema.returns)
        self._take_calls(overload)

    def _compile(self) -> Plan:
        name, schema, check = self.name, self._schema, self._check
        kernels = registered_kernels(self._native, name) if is_returnable(schema) else {}
        return self._plan(
            kernels=tuple(
                (kernel, checked(name, schema, function)) for kernel, function in kernels.items()
            ),
            finish=converting(lambda args, kwargs, result: check(result, name), schema),
            # Another library may close, and uncover a kernel that this plan does not know.
            is_foreign=True,
            as_dispatched=True,
        )


def attach(name: OpName, overload: OpOverload) -> None:
    """Makes calls of an overload native where they end at a kernel of ours.

    And those of the other overloads in its packet, which tries them in turn. Called when a kernel
    first runs: by then all of the operator is defined, and it is used. Called again for a kernel
    that was registered later, which is not in the plan.
    """
    if not _may_take(name):
        return

    parsed = overload._schema

    def take_calls() -> None:
        current = torch_ops.existing_overload(*name)
        if current is not overload or current._schema is not parsed:
            return  # it is gone by now, or the overload is that of the next operator
        for release in release_hooks:
            release(name)
        native = switch.native_module()
        if entry_of(name) is None:
            LowLevelCalls(native, name, overload)
        else:
            outdate(name)
        for sibling in torch_ops.overloads_beside(overload):
            other = OpName(name.namespace, name.name, sibling)
            if _may_take(other) and entry_of(other) is None and registered_kernels(native, other):
                LowLevelCalls(native, other, torch_ops.lookup_overload(*other))

    switch.request(take_calls)


def _may_take(name: OpName) -> bool:
    # An operator of PyTorch's own, in which somebody overrides a kernel, stays as it is.
    qualname = str(name)
    return operators.is_defined_in_python(qualname) and not registries.published_handle(qualname)


def entry_of(name: OpName) -> Entry | None:
    """Where native calls of an operator come in that has no handle, if there are any."""
    native, overload = switch.native_module(), torch_ops.existing_overload(*name)
    if native is None or overload is None:
        return None
    function = overload_functions.replaced_function(overload)
    return function.entry if isinstance(function, native.Operator) else None


def outdate(name: OpName) -> None:
    """Makes the next native call of an operator compile a new plan."""
    entry = entry_of(name)
    if entry is not None:
        entry.plan = None


def registered_kernels(
    native: Any, name: OpName, prefixes: Iterable[str] = (BACKEND, AUTOGRAD)
) -> dict[Any, Callable[..., Any]]:
    """What `Library.impl` was given for an operator, by the kernel that it made of it."""
    keys = (f"{prefix}{backend}" for prefix in prefixes for backend in native.backends)
    kernels = (native.python_kernel(name.packet, name.overload, key) for key in keys)
    return {
        kernel: getattr(kernel, KERNEL_ATTRIBUTE)
        for kernel in kernels
        if hasattr(kernel, KERNEL_ATTRIBUTE)
    }
