"""Native calls of operators that somebody else registered, with `torch.library`.

Nothing says what these operators consist of, or when that changes. So a plan is compiled from the
dispatcher's table. A function in the table is called if it is a plain kernel. A wrapper of
`torch.library.custom_op` is left out if torchop recognizes it, because a native call does the same.
Everything else is left to the dispatcher.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from torchop import CustomOpDef
from torchop._accelerate import gradients
from torchop._accelerate.kernels import Kernels, find_kernels, version_counter
from torchop._compat import (
    foreign_operators,
    inductor_writes,
    libraries,
    operators,
    overload_functions,
    torch_ops,
)
from torchop._core.lock import registration_lock
from torchop._native import low_level, switch
from torchop._native.extension import api
from torchop._native.plan import NativeCalls, unknown_type
from torchop.extend import OpName, OpOverload, Schema

if TYPE_CHECKING:
    from torchop._native._call_path import Plan

MADE_HERE = "it was defined with torchop, so its calls are native already"

# The operators of others whose calls are native.
adopted: dict[OpName, ForeignCalls] = {}


class ForeignCalls(NativeCalls):
    """The native calls of an operator that somebody else registered."""

    __slots__ = ("_library", "_overload", "problem")

    def __init__(
        self,
        native: Any,
        name: OpName,
        overload: OpOverload,
        library: torch.library.Library | None,  # that defined it, if it is known
    ) -> None:
        schema = Schema(operators.registered_schema(name.packet, name.overload))
        super().__init__(native, name, schema)
        self.problem: str | None = None  # why no call is native
        self._overload = overload
        self._library = library
        self._take_calls(overload)
        foreign_operators.when_exchanged(overload, self._take_exchanged)
        if library is not None:
            libraries.on_close(library, self.release)

    def release(self) -> None:
        """Restores everything that nobody else has changed since."""
        with registration_lock:
            if adopted.get(self.name) is not self:
                return
            del adopted[self.name]
            foreign_operators.forget_exchange(self._overload)
            foreign_operators.take_back_function(self._overload, self._native.Operator, self.entry)
            if self._library is not None:
                libraries.forget_hook(self._library, self.release)
            self.problem = "it is not accelerated any more"
            self.outdate()

    def _take_exchanged(self) -> None:
        """Takes the calls again after PyTorch has replaced the function of the overload."""
        if overload_functions.is_cpp_function(overload_functions.replaced_function(self._overload)):
            self._take_calls(self._overload)

    def _compile(self) -> Plan:
        """The plan for what the dispatcher has now."""
        native, name, overload, schema = self._native, self.name, self._overload, self._schema
        kernels = Kernels()
        if adopted.get(name) is self:
            kernels, self.problem = find_kernels(native, name, overload)
        autograd_kernel, gradient, sources = gradients.find(native, name, overload, schema)
        finish, convert = kernels.finish(name, schema, overload)
        sources = (*kernels.sources, *sources, *foreign_operators.dispatcher_source(overload))
        plan = self._plan(
            kernels=kernels.pairs,
            own_kernels=(autograd_kernel, version_counter(native, name, overload), None),
            returned_parameters=kernels.returned_parameters(schema),
            are_fresh=kernels.stock is not None,  # only custom_op promises that
            gradient=gradient,
            finish=finish,
            convert=convert,
            sources=sources if kernels.pairs else (),
            is_foreign=True,
            as_dispatched=True,
        )
        if kernels.pairs and plan.unknown_parameter is not None:
            self.problem = unknown_type(schema, plan)
        return plan


def adopt(name: OpName, library: torch.library.Library | None) -> str | None:
    """Makes calls of an operator native where possible; otherwise returns why none can be."""
    with registration_lock:
        native = switch.native_module()
        if native is None:
            return api.why_missing()
        _shorten_handle_calls(native)
        overload = torch_ops.live_overload(*name)
        if overload is None:
            return "it is gone"
        calls = adopted.get(name)
        if calls is not None and calls._overload is overload:
            return calls.problem
        release(name)
        # At Autograd, such a kernel may stand in front of those of others, which are native then.
        ours = low_level.registered_kernels(native, name, [low_level.BACKEND])
        if low_level.entry_of(name) is not None or ours:
            return MADE_HERE
        if not overload_functions.is_cpp_function(overload_functions.replaced_function(overload)):
            return "something replaced the function that its object in torch.ops calls"
        adopted[name] = ForeignCalls(native, name, overload, library)
        if overload._schema.is_mutable:
            inductor_writes.register_lowerings(str(name))
        return None


def release(name: OpName) -> None:
    """Releases an operator, if it was adopted."""
    calls = adopted.get(name)
    if calls is not None:
        calls.release()


low_level.release_hooks.append(release)


@functools.cache
def _shorten_handle_calls(native: Any) -> None:
    if foreign_operators.handle_calls_forward() and overload_functions.forwarding_classes():
        native.shorten_handle_calls(CustomOpDef)
