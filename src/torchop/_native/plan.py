"""Compile the plans for calls without the dispatcher, and keep the C++ objects for these calls."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchop._compat import (
    autograd,
    logs,
    overload_functions,
    torch_ops,
)
from torchop._compat.classes import OpOverload
from torchop._core.argument_errors import tensor_for_number
from torchop._core.definition import CallPlan, Definition
from torchop._core.lock import compute_then_publish, registration_lock
from torchop._core.registry import find_schema, own_definition
from torchop._native.extension import recipe
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.layout import LayoutRule
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import OBJECTS, Argument, Schema
from torchop._schema.text import arguments_alone, results_of

if TYPE_CHECKING:
    from torchop._native._call_path import Entry, Plan

# `finish(args, kwargs, result)` checks and converts a kernel's result if C++ cannot do so itself.
Finish = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]

# How native calls (calls without the dispatcher) record gradients: a tuple, a string with the
# reason why only the dispatcher can record them, or None. See `NativeCalls._plan`.
Gradient = tuple[Any, ...] | str | None


def _float(value: Any) -> float:
    return float.__float__(value) if isinstance(value, float) else float(value)


# Maps schema types to the conversions that the dispatcher applies to results. For an instance of a
# subclass, such as an IntEnum, the dispatcher reads the underlying value without calling any
# overridden methods.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "Tensor": lambda value: value,
    "Optional[Tensor]": lambda value: value,
    "List[Tensor]": list,
    "int": lambda value: int.__int__(operator.index(value)),
    "float": _float,
    "bool": bool,
    "str": str.__str__,
    **dict.fromkeys(OBJECTS, lambda value: value),
}


class NativeCalls:
    """Compiles an operator's call plans, and owns the entry (the C++ object for its calls).

    `OwnCalls` is for operators created by `torchop.custom_op`, `table.calls.TableCalls` for others.
    """

    __slots__ = ("_native", "_schema", "_version", "entry", "gradient_problem", "name")

    def __init__(self, native: Any, name: OpName, schema: Schema) -> None:
        self._native = native
        self._schema = schema
        self._version = 0  # the number of calls of `outdate`
        self.name = name
        # Why C++ cannot run calls that need a gradient, or None if it can
        self.gradient_problem: str | None = None
        self.entry: Entry = native.Entry(name, self)

    def __call__(self) -> None:
        """Compile a call plan. C++ calls this if a call of the operator finds no plan."""
        while self.entry.plan is None:
            compute_then_publish(self._compile, self._publish, lambda: self._version)
        self._native.log_fallbacks(logs.calls.isEnabledFor(logging.INFO))

    def _publish(self, plan: Plan) -> None:
        if self.entry.plan is None:  # otherwise another thread has published an equal plan
            self.entry.plan = plan

    def outdate(self) -> None:
        """Make the next call compile a new plan. The caller must hold `registration_lock`."""
        self._version += 1
        self.entry.plan = None

    def log_fallback(self, /, *args: Any, **kwargs: Any) -> None:
        """Log why a call falls back to the dispatcher. C++ calls this once per reason."""
        # `explain` is in a higher layer, so it cannot be imported here.
        found = sys.modules["torchop"].explain(str(self.name), *args, **kwargs)
        # C++ also falls back to the dispatcher while a device graph is being captured. `explain`
        # does not check this, so it may report that the call is native (runs without the
        # dispatcher).
        if not found.native:
            text = "%s: a call goes through the dispatcher, because %s"
            logs.calls.info(text, self.name, found.reason)

    def _compile(self) -> Plan:
        raise NotImplementedError

    def _take_calls(self, overload: OpOverload) -> None:
        # The last line lets other threads' calls reach the entry (the C++ object that runs calls),
        # so first set `dispatch`, the function that calls fall back to.
        self.entry.dispatch = overload_functions.replaced_function(overload)
        overload_functions.replace_function(overload, self._native.Operator, self.entry)

    def _plan(
        self,
        kernels: tuple[tuple[Any, ...], ...],
        finish: Finish,
        *,
        own_kernels: tuple[Any, Any, Any] = (None, None, None),
        returned_parameters: tuple[int, ...] = (),
        are_fresh: bool = False,
        gradient: Gradient = None,
        **more: Any,
    ) -> Plan:
        """Create a `Plan`. See `_call_path.pyi` for the arguments.

        If `gradient` is a tuple, its first item is the autograd.Function for which calls create
        autograd nodes. If it is a string, it gives the reason why only the dispatcher can record
        gradients.
        """
        gradient = recipe.unknown_nodes() or gradient
        self.gradient_problem = gradient if isinstance(gradient, str) else None
        if isinstance(gradient, tuple):
            function, *how = gradient
            take_node = self._native.take_node if self._native.nodes_come_from_apply else None
            gradient = (autograd.node_maker(function, take_node), *how)
        schema = self._schema
        plan: Plan = self._native.Plan(
            name=self.name.packet,
            overload=self.name.overload,
            parameters=tuple(map(_parameter, schema.arguments)),
            keyword_names=tuple(sys.intern(a.name) for a in schema.keyword_only),
            kernels=kernels,
            own_kernels=own_kernels,
            returns=schema.returns,
            returned_parameters=returned_parameters,
            are_fresh=are_fresh,
            gradient=None if isinstance(gradient, str) else gradient,
            finish=finish,
            **more,
        )
        return plan


class OwnCalls(NativeCalls):
    __slots__ = ("_definition",)

    def __init__(self, native: Any, definition: Definition) -> None:
        super().__init__(native, definition.name, definition.schema)
        self._definition = definition

    def attach(self) -> None:
        """Let C++ also run the calls made through `torch.ops`.

        This is deferred until the operator is first used, because creating an `OpOverload` would
        take longer than the rest of the definition.
        """
        definition = self._definition
        with registration_lock:
            if self.entry.dispatch is not None or definition.deregistration_reason is not None:
                return
            self._take_calls(definition.overload)
            self._bypass_kernels()
            # A call to the packet tries the overloads in order, so C++ can run a call to this
            # overload only if the earlier overloads have entries (C++ objects that run calls) too.
            # Create these entries.
            for sibling in torch_ops.other_overloads(definition.overload):
                other = own_definition(None, definition.name._replace(overload=sibling))
                if other is not None and other.calls is not None:
                    other.calls.attach()

    def check_call(self, /, *args: Any, **kwargs: Any) -> None:
        """Raise the error for a call in which C++ found a tensor in place of a number."""
        self._check(args, kwargs, [])

    def check_packet_call(self, /, *args: Any, **kwargs: Any) -> None:
        """Like `check_call`, but accept a tensor if another overload of the packet accepts it."""
        names = torch_ops.overload_names(self.name.packet)
        others = [self.name._replace(overload=name) for name in names if name != self.name.overload]
        self._check(args, kwargs, [find_schema(name) for name in others])

    def _check(self, args: Any, kwargs: Any, others: Sequence[Schema]) -> None:
        error = tensor_for_number(self.name, self._schema, args, kwargs, others)
        if error is not None:
            raise error

    def _bypass_kernels(self) -> None:
        """Make the dispatcher skip torchop's Python kernels that would only redispatch the call."""
        definition = self._definition
        name = definition.name
        if self._schema.spelled_devices:
            return  # the kernels must convert device names to devices before a mode runs
        for key in ("Autograd", "ADInplaceOrView"):
            if key == "Autograd" and definition.rule(LayoutRule).layouts:
                continue  # the kernel copies arguments
            kernel = definition.registered.kernel(key)
            remove = self._native.bypass(name.packet, name.overload, key, kernel)
            if remove is not None:
                definition.registered.add(f"bypass of {key}", None, remove)

    def _compile(self) -> Plan:
        definition = self._definition
        definition.check_defined()
        plan = definition.plan
        # If the call plan was compiled before the C++ extension was loaded, `attach` has not run
        # yet.
        self.attach()
        return self.compiled(plan)

    def compiled(self, plan: CallPlan) -> Plan:
        definition, schema = self._definition, self._schema
        kernels = plan[KernelRule]
        dispatched = definition.registered.kernel
        is_plain = schema.form is Form.PLAIN
        declared = definition.declaration.residuals
        return self._plan(
            kernels=tuple(
                (dispatched(key), function, declared and declared.author_of(function))
                for key, device in definition.rule(KernelRule).installed().items()
                if is_returnable(schema) and (function := kernels.functions.get(device)) is not None
            ),
            own_kernels=(
                dispatched("Autograd"),
                dispatched("ADInplaceOrView"),
                dispatched("BackendSelect"),
            ),
            returned_parameters=() if is_plain else tuple(i for i, _ in schema.mutated_places),
            are_fresh=kernels.outputs_are_fresh and not kernels.returns_arguments,
            gradient=gradient_of(definition, plan),
            finish=converting(functools.partial(kernels.finish, definition), schema),
            residuals=declared and declared.in_plan(self._native, plan[AutogradRule]),
            layouts=tuple(
                (index, layout.is_channels_last)
                for index, argument in enumerate(schema.arguments)
                if (layout := definition.rule(LayoutRule).layouts.get(argument.name)) is not None
            ),
        )


def gradient_of(definition: Definition, plan: CallPlan) -> Gradient:
    schema, formula = plan.schema, plan[AutogradRule]
    if schema.form is not Form.PLAIN:
        return "it rebases the history of the tensors that the operator mutates"
    # The first call that needs a gradient goes through the dispatcher. It creates the
    # autograd.Function and finds out which tensors setup_context computes, so later calls can be
    # native (run without the dispatcher).
    function = definition.rule(AutogradRule).cached_function
    if function is None or not formula.computed:
        return "the first call that records one is never native, but later ones are"
    return function, formula.save, None, formula.before_kernel, None


def is_returnable(schema: Schema) -> bool:
    return all(kind in _CONVERSIONS for kind in schema.returns)


def unknown_type(schema: Schema, plan: Plan) -> str:
    """Describe the argument or result whose type calls without the dispatcher do not support."""
    if plan.unknown_parameter is not None:
        arguments = arguments_alone(schema.written)
        what = f"argument '{arguments[plan.unknown_parameter]}'"
    else:
        kinds = zip(schema.returns, results_of(schema.written), strict=True)
        what = next(f"a result '{text}'" for kind, text in kinds if kind not in _CONVERSIONS)
    return f"{what} has a type that only the dispatcher can convert"


def converting(function: Callable[..., Any], schema: Schema) -> Callable[..., Any]:
    """Return a function that calls `function` and converts the result as the dispatcher would."""
    convert = _conversion(schema)
    return lambda *args: convert(function(*args))


def _conversion(schema: Schema) -> Callable[[Any], Any]:
    each = [_CONVERSIONS.get(kind, _CONVERSIONS["Tensor"]) for kind in schema.returns]
    if not each:
        return lambda result: None
    if len(each) == 1:
        return each[0]
    return lambda result: tuple(convert(item) for convert, item in zip(each, result, strict=True))


def _parameter(argument: Argument) -> tuple[Any, ...]:
    parameter = sys.intern(argument.name), argument.kind, argument.is_mutated
    return (*parameter, argument.default) if argument.has_default else parameter
