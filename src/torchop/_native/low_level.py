"""Native calls of operators that were defined at the low level.

`Library.impl` registers their kernels, or `register_kernel`, whose registrations a definition of
the operator holds, one for each library. `register_autograd` registers their gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torchop._compat import deregistration, operators, overload_functions, registries, torch_ops
from torchop._compat.classes import OpOverload
from torchop._core import registry
from torchop._core.checking import checked
from torchop._core.contract import result_check
from torchop._core.definition import Definition
from torchop._core.registry import find_schema
from torchop._native import switch
from torchop._native.plan import Gradient, NativeCalls, converting, gradient_of, is_returnable
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.kernels.rule import KernelRule, place_of
from torchop._schema.forms import Form
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

_calls: weakref.WeakValueDictionary[OpName, LowLevelCalls] = weakref.WeakValueDictionary()


class LowLevelCalls(NativeCalls):
    """The native calls of an operator that was defined at the low level."""

    __slots__ = ("__weakref__", "_check")

    def __init__(self, native: Any, name: OpName, overload: OpOverload) -> None:
        super().__init__(native, name, find_schema(name))
        self._check = result_check(self._schema.returns)
        _calls[name] = self
        self._take_calls(overload)

    def _compile(self) -> Plan:
        name, schema, check = self.name, self._schema, self._check
        kernels = registered_kernels(self._native, name) if is_returnable(schema) else {}
        autograd_kernel, gradient = registered_gradient(self._native, name)
        # Another library may close, and uncover a kernel that this plan does not know.
        options: dict[str, Any] = {"gradient": gradient, "is_foreign": True}
        options["own_kernels"] = (autograd_kernel, None, None)
        places = {kernel: place for kernel in kernels if (place := place_of(kernel)) is not None}
        definitions = {rule.definition for rule, _ in places.values()}
        if len(places) == len(kernels) and len(definitions) == 1:
            (definition,) = definitions
            compiled = definition.plan[KernelRule]
            is_plain = schema.form is Form.PLAIN
            return self._plan(
                kernels=tuple(
                    (kernel, compiled.functions[device]) for kernel, (_, device) in places.items()
                ),
                finish=converting(functools.partial(compiled.finish, definition), schema),
                returned_parameters=() if is_plain else tuple(i for i, _ in schema.mutated_places),
                **options,
            )
        # Beside those of `Library.impl`, which gets no argument that equals its default, a kernel
        # of a definition fills in these arguments itself.
        return self._plan(
            kernels=tuple(
                (kernel, function if kernel in places else checked(name, schema, function))
                for kernel, function in kernels.items()
            ),
            finish=converting(lambda args, kwargs, result: check(result, name), schema),
            as_dispatched=True,
            **options,
        )


def registered_gradient(native: Any, name: OpName) -> tuple[Callable[..., Any] | None, Gradient]:
    """The kernel that `register_autograd` of a definition registered, and how calls replace it."""
    for backend in native.backends:
        kernel = native.python_kernel(name.packet, name.overload, f"{AUTOGRAD}{backend}")
        definition = definition_of_gradient(kernel)
        if definition is not None:
            return kernel, gradient_of(definition, definition.plan)
    return None, None


def definition_of_gradient(kernel: Any) -> Definition | None:
    """The definition whose gradients a kernel at Autograd records; None for other kernels."""
    rule = getattr(kernel, "__self__", None)
    if not isinstance(rule, AutogradRule) or rule.definition.reason_gone is not None:
        return None
    return rule.definition


def calls_of(name: OpName) -> LowLevelCalls | None:
    """The native calls of an operator that was defined at the low level, if there are any."""
    calls = _calls.get(name)
    return None if calls is None or entry_of(name) is not calls.entry else calls


class Follower:
    """Makes calls native that run the registrations of a definition, and renews their plan."""

    __slots__ = ("_name",)

    def __init__(self, definition: Definition) -> None:
        self._name = definition.name

    def attach(self) -> None:
        """Makes calls native, unless another package defined the operator.

        `accelerate` does that for such an operator, because it may have other kernels, too.
        """
        name = self._name
        if name.packet in deregistration.defined and entry_of(name) is None:
            overload = torch_ops.existing_overload(*name) or torch_ops.live_overload(*name)
            if overload is not None:
                attach(name, overload)

    def outdate(self) -> None:
        outdate(self._name)


registry.new_follower = Follower


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
    """The kernels that were registered with torchop, and the function to call for each.

    For a kernel of `Library.impl`, that is the function that was registered. A kernel of a
    definition is to be called itself, or what the plan of the definition has in its place.
    """
    keys = (f"{prefix}{backend}" for prefix in prefixes for backend in native.backends)
    kernels = (native.python_kernel(name.packet, name.overload, key) for key in keys)
    is_defined = name.packet in deregistration.defined
    return {
        kernel: getattr(kernel, KERNEL_ATTRIBUTE, kernel)
        for kernel in kernels
        if hasattr(kernel, KERNEL_ATTRIBUTE) or (is_defined and _is_of_definition(kernel))
    }


def _is_of_definition(kernel: Any) -> bool:
    place = place_of(kernel)
    return place is not None and place[0].definition.reason_gone is None
