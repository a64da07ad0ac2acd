"""Native calls of one operator: their entry point, and their plan, also for one of ours."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchop._compat import autograd, libraries, logs, overload_functions, torch_ops
from torchop._compat.classes import OpOverload
from torchop._core.definition import CallPlan, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import own_definition
from torchop._native.extension import recipe
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import OBJECTS, Argument, Schema
from torchop._schema.text import arguments_alone, results_of

if TYPE_CHECKING:
    from torchop._native._call_path import Entry, Plan

# What a plan calls with (args, kwargs, result) for results that are not just fresh tensors.
Finish = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]

# How a plan is to record a gradient: see `NativeCalls._plan`.
Gradient = tuple[Any, ...] | str | None


def _float(value: Any) -> float:
    return float.__float__(value) if isinstance(value, float) else float(value)


# The conversions that the dispatcher applies to results of these types. It reads the value of a
# subclass of Python's types, such as that of an enum, and not what its methods make of it.
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
    """The native calls of an operator.

    `OwnCalls` is for operators of `custom_op`, and `table.calls.TableCalls` for all others.
    """

    __slots__ = ("_native", "_schema", "entry", "gradient_problem", "name")

    def __init__(self, native: Any, name: OpName, schema: Schema) -> None:
        self._native = native
        self._schema = schema
        self.name = name
        # Why no call records a gradient natively, as the latest plan has it.
        self.gradient_problem: str | None = None
        # Where the calls come in.
        self.entry: Entry = native.Entry(name, self)

    def __call__(self) -> None:
        """Compiles the plan that calls follow: what a call does that finds none."""
        with registration_lock:
            if self.entry.plan is None:  # no other thread was first
                self.entry.plan = self._compile()
        self._native.set_observer(_log_call if logs.calls.isEnabledFor(logging.INFO) else None)

    def outdate(self) -> None:
        """Makes the next native call compile a new plan."""
        self.entry.plan = None

    def _compile(self) -> Plan:
        raise NotImplementedError  # every subclass defines its own

    def _take_calls(self, overload: OpOverload) -> None:
        """Makes an object of `torch.ops` call the entry."""
        # A call in another thread may come as soon as the function is replaced.
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
        """A plan of this operator; the arguments are those of `Plan` in `_call_path.pyi`.

        `gradient` starts with the autograd.Function of the nodes; or it is a string that says why
        the dispatcher has to record gradients.
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


def _log_call(calls: NativeCalls, /, *args: Any, **kwargs: Any) -> None:
    """Logs why the dispatcher gets a call, the first of its operator for this reason."""
    name = str(calls.name)
    found = sys.modules["torchop"].explain(name, *args, **kwargs)  # far above this file
    if not found.native:  # as it is where a graph is captured just now
        logs.calls.info("%s: a call goes through the dispatcher, because %s", name, found.reason)


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
            # A packet tries its overloads in turn, so none of its calls is native before the first.
            for sibling in torch_ops.overloads_beside(definition.overload):
                other = own_definition(None, definition.name._replace(overload=sibling))
                if other is not None and isinstance(other.follower, OwnCalls):
                    other.follower.attach()

    def _bypass_kernels(self) -> None:
        """Makes the dispatcher skip those of our Python kernels that have nothing to do."""
        definition = self._definition
        name = definition.name
        if self._schema.spelled_devices:
            return  # these kernels turn the name of a device into one, which modes see
        for key in ("Autograd", "ADInplaceOrView"):
            kernel = definition.dispatcher_kernels.get(key)
            remove = self._native.bypass(name.packet, name.overload, key, kernel)
            if remove is not None:
                libraries.on_close(definition.library, remove)

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
        declared = definition.declaration.residuals
        return self._plan(
            kernels=tuple(
                (dispatched[key], function, declared and declared.author_of(function))
                for key, device in definition.rule(KernelRule).installed.items()
                if is_returnable(schema) and (function := kernels.functions.get(device)) is not None
            ),
            own_kernels=(
                dispatched.get("Autograd"),
                dispatched.get("ADInplaceOrView"),
                dispatched.get("BackendSelect"),
            ),
            returned_parameters=() if is_plain else tuple(i for i, _ in schema.mutated_places),
            are_fresh=kernels.outputs_are_fresh and not kernels.returns_arguments,
            gradient=gradient_of(definition, plan),
            finish=converting(functools.partial(kernels.finish, definition), schema),
            residuals=declared and declared.in_plan(self._native, plan[AutogradRule]),
        )


def gradient_of(definition: Definition, plan: CallPlan) -> Gradient:
    """The gradient of a `Plan`, as in `_call_path.pyi`; or why the dispatcher records gradients."""
    schema, formula = plan.schema, plan[AutogradRule]
    if schema.form is not Form.PLAIN:
        return "it rebases the history of the tensors that the operator mutates"
    # It is made when a call first records a gradient.
    function = definition.rule(AutogradRule).cached_function
    if function is None:
        return "the first call that records one is never native, but later ones are"
    return function, formula.save, None, formula.look


def is_returnable(schema: Schema) -> bool:
    """Whether it is known what the dispatcher makes of the results."""
    return all(kind in _CONVERSIONS for kind in schema.returns)


def unknown_type(schema: Schema, plan: Plan) -> str:
    """What of a schema keeps calls from being native by its type, where something does."""
    if plan.unknown_parameter is not None:
        arguments = arguments_alone(schema.written)
        what = f"argument '{arguments[plan.unknown_parameter]}'"
    else:
        kinds = zip(schema.returns, results_of(schema.written), strict=True)
        what = next(f"a result '{text}'" for kind, text in kinds if kind not in _CONVERSIONS)
    return f"{what} has a type that only the dispatcher can convert"


def converting(function: Callable[..., Any], schema: Schema) -> Callable[..., Any]:
    """A function that returns results, with the conversions that the dispatcher applies to them."""
    convert = _conversion(schema)
    return lambda *args: convert(function(*args))


def _conversion(schema: Schema) -> Callable[[Any], Any]:
    """What the dispatcher makes of results that are of the schema's types."""
    each = [_CONVERSIONS.get(kind, _CONVERSIONS["Tensor"]) for kind in schema.returns]
    if not each:
        return lambda result: None
    if len(each) == 1:
        return each[0]
    return lambda result: tuple(convert(item) for convert, item in zip(each, result, strict=True))


def _parameter(argument: Argument) -> tuple[Any, ...]:
    parameter = sys.intern(argument.name), argument.kind, argument.is_mutated
    return (*parameter, argument.default) if argument.has_default else parameter
