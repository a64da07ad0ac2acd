"""Native calls of operators that somebody else registered, with `torch.library`.

Nobody tells what these operators consist of, or when that changes. So a plan is made from what the
dispatcher's table holds. A function there is called if it is a plain kernel; what `custom_op` of
`torch.library` puts around a kernel is left out if it is known to be exactly that, since a native
call does the same. Anything else is left to the dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from torchop._accelerate import gradients
from torchop._accelerate import kernels as foreign_kernels
from torchop._compat import handles, libraries, operators, overload_functions, torch_ops
from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._core.lock import registration_lock
from torchop._native import low_level, switch
from torchop._native.extension import api
from torchop._native.plan import described
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

MADE_HERE = "it was made with torchop, which makes its calls native"

_foreign: dict[OpName, ForeignOperator] = {}
_flags_are_known: bool | None = None


class ForeignOperator:
    """An operator of somebody else's whose calls are native where they can be.

    Attributes:
        name: the operator.
        problem: why no call is native; None if calls are.
        entry: where its calls come in.
    """

    def __init__(self, native: Any, name: OpName, overload: OpOverload) -> None:
        self.name = name
        self.problem: str | None = None
        self._native = native
        self._overload = overload
        self._schema = Schema(operators.registered_schema(name.packet, name.overload))
        self._is_active = True
        self._library: torch.library.Library | None = None
        self.entry = native.Entry(name.packet, self.refresh)
        self._come_in()
        overload_functions.when_exchanged(overload, self._come_in)

    def follow(self, library: torch.library.Library | None) -> None:
        """Lets go of the operator when the library that defined it does."""
        if library is not None:
            self._library = library
            libraries.on_close(library, self.let_go)

    def let_go(self) -> None:
        """Puts everything back as it was, where nobody has changed it since."""
        with registration_lock:
            if not self._is_active:
                return
            self._is_active = False
            if _foreign.get(self.name) is self:
                del _foreign[self.name]
            overload_functions.forget_exchange(self._overload)
            overload_functions.take_back_function(self._overload, self._native.Operator, self.entry)
            if self._library is not None:
                libraries.forget_hook(self._library, self.let_go)
            self.problem = "it is not accelerated any more"
            self.entry.plan = None

    def refresh(self) -> None:
        """Makes the plan that calls follow, from what the dispatcher has now."""
        with registration_lock:
            kernels = foreign_kernels.NONE
            if self._is_active:
                kernels, self.problem = foreign_kernels.find(
                    self._native, self.name, self._overload
                )
            plan = self._make_plan(kernels)
            if kernels.pairs and plan.always_dispatches:
                self.problem = "its schema has a type that only the dispatcher converts"
            self.entry.plan = plan

    def _come_in(self) -> None:
        """Makes calls of the overload come in here."""
        function = overload_functions.replaced_function(self._overload)
        if overload_functions.is_cpp_function(function):
            # A call in another thread may come as soon as the function is replaced.
            self.entry.dispatch = function
            overload_functions.replace_function(self._overload, self._native.Operator, self.entry)

    def _make_plan(self, kernels: foreign_kernels.Kernels) -> Any:
        native, name, schema = self._native, self.name, self._schema
        own_autograd, gradient, sources = gradients.find(native, name, self._overload, schema)
        version_counter = foreign_kernels.version_counter(native, name, self._overload)
        return native.Plan(
            **described(name, schema),
            kernels=kernels.pairs,
            own_kernels=(own_autograd, version_counter, None),
            returned_parameters=kernels.returned_parameters(schema),
            are_fresh=kernels.check is not None,  # only custom_op promises that
            gradient=gradient,
            finish=kernels.finish(name, schema),
            sources=(*kernels.sources, *sources) if kernels.pairs else (),
            is_foreign=True,
            as_dispatched=True,
        )


def adopt(name: OpName, library: torch.library.Library | None) -> str | None:
    """Makes calls of an operator native where they can be; returns why they never are.

    Args:
        name: the operator.
        library: the one that defined it, if it is known.
    """
    with registration_lock:
        native = switch.native_module()
        if native is None:
            return api.why_missing()
        if not _knows_flags(native):
            return "this PyTorch keeps Python kernels in an unknown way"
        overload = torch_ops.live_overload(*name)
        if overload is None:
            return "it is gone"
        known = _foreign.get(name)
        if known is not None and known._overload is overload:
            return known.problem
        if known is not None:
            known.let_go()
        if low_level.entry_of(name) is not None or low_level.registered_here(native, name):
            return MADE_HERE
        if not overload_functions.is_cpp_function(overload_functions.replaced_function(overload)):
            return "somebody has replaced the function that its object in torch.ops calls"
        made = ForeignOperator(native, name, overload)
        _foreign[name] = made
        made.follow(library)
        return None


def find(name: OpName) -> ForeignOperator | None:
    """The operator of somebody else's whose calls are native, if this is one."""
    return _foreign.get(name)


def adopted() -> list[OpName]:
    """The names of all of them."""
    return list(_foreign)


def release(name: OpName) -> None:
    """Lets go of an operator, if it is one of these."""
    known = _foreign.get(name)
    if known is not None:
        known.let_go()


low_level.releasing.append(release)


def _knows_flags(native: Any) -> bool:
    global _flags_are_known
    if _flags_are_known is None:
        with libraries.probe_operators() as (plain, with_keys, _):
            _flags_are_known = native.learn_flags(plain, with_keys)
        if (
            _flags_are_known
            and handles.handle_calls_forward()
            and overload_functions.forwarding_classes()
        ):
            native.shorten_handle_calls(CustomOpDef)
    return _flags_are_known
