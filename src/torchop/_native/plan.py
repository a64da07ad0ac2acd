"""From a compiled plan to the one that native calls follow."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchop._compat import autograd
from torchop._core.definition import CallPlan
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Argument, Schema

if TYPE_CHECKING:
    from torchop._core.definition import Definition
    from torchop._native._call_path import Plan

# What the dispatcher makes of the results of these kinds, once they are known to be of them.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "Tensor": lambda value: value,
    "Optional[Tensor]": lambda value: value,
    "List[Tensor]": list,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
}


def make_plan(native: Any, definition: Definition, plan: CallPlan) -> Plan:
    """Compiles the plan of an operator for native calls.

    Args:
        native: the extension module.
        definition: the operator.
        plan: its compiled rules.
    """
    schema = plan.schema
    kernels = plan[KernelRule]
    own = definition.dispatcher_kernels
    returnable = is_returnable(schema)
    made: Plan = native.Plan(
        **described(definition.name, schema),
        kernels=tuple(
            (own[key], kernels.functions[device])
            for key, device in definition.rule(KernelRule).installed.items()
            if returnable and device in kernels.functions
        ),
        own_kernels=(own.get("Autograd"), own.get("ADInplaceOrView"), own.get("BackendSelect")),
        returned_parameters=_returned_parameters(schema),
        are_fresh=kernels.outputs_are_fresh and not kernels.returns_arguments,
        gradient=_gradient(definition, plan),
        finish=converting(functools.partial(kernels.finish, definition), schema),
    )
    return made


def described(name: OpName, schema: Schema) -> dict[str, Any]:
    """What a plan says of any operator: its name, its parameters and its results."""
    return {
        "name": name.packet,
        "overload": name.overload,
        "parameters": tuple(map(_parameter, (*schema.positional, *schema.keyword_only))),
        "keyword_names": tuple(sys.intern(a.name) for a in schema.keyword_only),
        "returns": schema.returns,
    }


def is_returnable(schema: Schema) -> bool:
    """Whether it is known what the dispatcher makes of the results."""
    return all(kind in _CONVERSIONS for kind in schema.returns)


def converting(
    check: Callable[[tuple[Any, ...], dict[str, Any], Any], Any], schema: Schema
) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any]:
    """What happens to the results that are not just tensors in memory of their own.

    Args:
        check: `check(args, kwargs, result)` returns the result as the schema has it, or raises.
        schema: of the operator.
    """
    convert = _conversion(schema)
    return lambda args, kwargs, result: convert(check(args, kwargs, result))


def _conversion(schema: Schema) -> Callable[[Any], Any]:
    """What the dispatcher makes of results that are of the schema's types."""
    each = [_CONVERSIONS.get(kind, _CONVERSIONS["Tensor"]) for kind in schema.returns]
    if not each:
        return lambda result: None
    if len(each) == 1:
        return each[0]
    return lambda result: tuple(convert(item) for convert, item in zip(each, result, strict=True))


def _parameter(argument: Argument) -> tuple[Any, ...]:
    described = sys.intern(argument.name), argument.kind, argument.is_mutated
    return (*described, argument.default) if argument.has_default else described


def _returned_parameters(schema: Schema) -> tuple[int, ...]:
    """The places, among the parameters, of those that the operator has to return."""
    if schema.form is Form.PLAIN:
        return ()
    arguments = (*schema.positional, *schema.keyword_only)
    return tuple(index for index, argument in enumerate(arguments) if argument.is_mutated)


def _gradient(
    definition: Definition, plan: CallPlan
) -> tuple[type, Callable[..., Any] | None] | None:
    # The function is made when a call first records a gradient; until then, and where a gradient
    # flows through anything but tensors, the dispatcher does it.
    function = definition.rule(AutogradRule).cached_function
    schema = plan.schema
    if function is None or schema.form is not Form.PLAIN or set(schema.returns) != {"Tensor"}:
        return None  # PyTorch rewrites the history of what is written
    formula = plan[AutogradRule]
    if not formula.is_native:
        return None  # a derived formula looks at the state of the thread before the kernel runs
    return autograd.context_type(function), formula.setup_context
