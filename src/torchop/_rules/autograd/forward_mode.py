"""Forward mode: the tangents of an operator's outputs.

A call with tangents takes three steps: the operator is called on the tensors without their
tangents, the formula computes the tangents of the outputs, and the two are combined. So a formula
consists of ordinary calls, which outer transforms can follow. Only a call that also records
gradients goes through the `autograd.Function`: the tensors that it saves have to keep their
tangents, for forward mode over the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.library
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchop._compat import autograd, compilers, functorch, tracing
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import ForwardModeError, GradientError
from torchop._rules.autograd.checks import check_tensors
from torchop._rules.autograd.gradients import (
    flatten,
    input_layout,
    is_differentiable,
    layout_of,
    unflatten,
)
from torchop._schema.callables import check_signature
from torchop._schema.schema import TENSOR_LISTS

# A formula and its `setup_context`, as registered: without one, that of the backward serves. In a
# plan, it is a function `setup_context(ctx, inputs, keyword_only_inputs, output)`.
Tangents = tuple[Callable[..., Any], Callable[..., Any] | None]


_FOLLOWED = TENSOR_LISTS | {"Tensor", "Optional[Tensor]"}


def check_jvp(definition: Definition, jvp: Callable[..., Any]) -> None:
    """Refuses a formula for tangents that cannot be right, or cannot be called."""
    schema = definition.schema
    if not schema.is_functional:
        raise RuntimeError(
            f"Cannot register jvp for non-functional operator {definition} with schema {schema}: a "
            "formula can give tangents to fresh results, not to what is written or viewed. Define "
            "a functional operator and register the formula for that; its derive_inplace() and "
            "derive_out() write its results."
        )
    check_tensors(
        definition,
        "register_jvp",
        _FOLLOWED,
        no_place="jvp has no place for their tangents",
        mode="forward mode",
    )
    tangents = (f"tangent_of_{argument.name}" for argument in schema.positional)
    check_signature(f"{definition}: jvp", jvp, ("ctx", *tangents))


class ForwardContext(FunctionCtx):
    """The `ctx` of a formula for tangents: that of an `autograd.Function`, beside no node.

    `needs_input_grad` says for each input whether it has a tangent; it has a list for a list.
    """

    # What the methods of PyTorch's class set.
    to_save: Any = ()
    saved_for_forward: Any = None
    non_differentiable: Any = ()
    materialize_grads = True

    def __init__(self, needs_input_grad: tuple[Any, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> Any:
        # A `setup_context` that serves both modes may save for the backward only.
        return self.to_save if self.saved_for_forward is None else self.saved_for_forward


def _materialized(ctx: ForwardContext, primal: Any, tangent: Tensor | None) -> Tensor | None:
    if tangent is None and ctx.materialize_grads and is_differentiable(primal):
        return torch.zeros_like(primal)
    return tangent


def has_tangents(values: Sequence[Any]) -> bool:
    """Whether a tensor among the values, or in a list among them, has a tangent.

    This is only asked at a dual level.
    """
    return any(autograd.unpack_dual(tensor)[1] is not None for tensor in tensors_in(values))


def differentiate(
    definition: Definition, rule: Tangents, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a call in which tensors have tangents, and none requires grad."""
    inputs, keywords = definition.schema.fill_defaults(args, kwargs)
    layout = input_layout(definition, inputs)
    primals = [autograd.unpack_dual(value)[0] for value in flatten(inputs, layout)]
    output = definition.overload(*unflatten(primals, layout), **keywords)
    tangents = tangents_of(definition, rule, inputs, keywords, output)
    outputs = output if isinstance(output, tuple) else (output,)
    layout = layout_of(outputs)
    duals = [
        value if tangent is None else autograd.make_dual(value, tangent)
        for value, tangent in zip(flatten(outputs, layout), tangents, strict=True)
    ]
    structured = unflatten(duals, layout)
    return structured if isinstance(output, tuple) else structured[0]


def tangents_of(
    definition: Definition,
    rule: Tangents,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    output: Any,
) -> list[Tensor | None]:
    """The tangents of the outputs of a call, those in lists included; None where there is none."""
    jvp, setup_context = rule
    _check_not_compiled(definition, inputs)
    layout = input_layout(definition, inputs)
    duals = [autograd.unpack_dual(value) for value in flatten(inputs, layout)]
    ctx = ForwardContext(unflatten([tangent is not None for _, tangent in duals], layout))
    if setup_context is not None:
        primals = unflatten([primal for primal, _ in duals], layout)
        setup_context(ctx, primals, keywords, output)
    input_tangents = [_materialized(ctx, *dual) for dual in duals]
    outputs = output if isinstance(output, tuple) else (output,)
    returned = jvp(ctx, *unflatten(input_tangents, layout))
    tangents = flatten(_checked(definition, ctx, outputs, returned), layout_of(outputs))
    # Writing into an output also writes into its tangent, which must not be that of an input.
    ids = set(map(id, input_tangents))
    return [
        tangent.clone()
        if tangent is not None and (id(tangent) in ids or tangent._is_view())
        else tangent
        for tangent in tangents
    ]


def _check_not_compiled(definition: Definition, inputs: Sequence[Any]) -> None:
    if (
        not functorch.is_active()
        and any(map(tracing.is_traced, tensors_in(inputs)))
        and compilers.dynamo_is_tracing()
    ):
        raise ForwardModeError(
            f"{definition} was called with dual tensors in a compiled function. PyTorch does not "
            "pass their tangents to operators there, so they would be lost. Call torch.func.jvp "
            "inside the function, or use dual tensors outside the compiled function."
        )


def _checked(
    definition: Definition, ctx: ForwardContext, outputs: tuple[Any, ...], returned: Any
) -> list[Any]:
    """The tangents of the outputs, None where there is none, in their structure."""
    tangents = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(outputs) == 1 and isinstance(outputs[0], list):
        is_wrapped = len(tangents) == 1 and (tangents[0] is None or isinstance(tangents[0], list))
        tangents = tangents if is_wrapped else (list(tangents),)
    if len(tangents) != len(outputs):
        raise GradientError(
            f"{definition}: jvp returned an incorrect number of tangents (expected "
            f"{len(outputs)}, got {len(tangents)}). It must return one for each output, or None."
        )
    pairs = enumerate(zip(outputs, tangents, strict=True))
    return [_checked_output(definition, ctx, f"output {i}", o, t) for i, (o, t) in pairs]


def _checked_output(
    definition: Definition, ctx: ForwardContext, where: str, output: Any, tangent: Any
) -> Any:
    if isinstance(output, list):
        tangents = [None] * len(output) if tangent is None else tangent
        if not isinstance(tangents, (list, tuple)) or len(tangents) != len(output):
            raise _wrong_tangent(definition, where, f"None or a list of {len(output)}", tangent)
        return [
            _checked_output(definition, ctx, f"{where}[{index}]", *pair)
            for index, pair in enumerate(zip(output, tangents, strict=True))
        ]
    if tangent is None or any(output is constant for constant in ctx.non_differentiable):
        return None
    if not is_differentiable(output):
        raise _wrong_tangent(definition, where, "None, because it has no derivative", tangent)
    expected = f"a tensor of shape {list(output.shape)} and {output.dtype}, as the output, or None"
    if not isinstance(tangent, Tensor) or (
        (tangent.shape, tangent.dtype) != (output.shape, output.dtype)
    ):
        raise _wrong_tangent(definition, where, expected, tangent)
    return tangent


def _wrong_tangent(
    definition: Definition, where: str, expected: str, tangent: Any
) -> GradientError:
    got = type(tangent).__name__
    if isinstance(tangent, Tensor):
        got = f"one of shape {list(tangent.shape)} and {tangent.dtype}"
    return GradientError(
        f"{definition}: jvp returned the wrong tangent for {where}: expected {expected}, got {got}."
    )


def refuse(definition: Definition) -> ForwardModeError:
    """The error for a call with tangents of an operator that has no formula for them."""
    return ForwardModeError(
        f"{definition} does not support forward-mode differentiation (torch.func.jvp, jacfwd, dual "
        "tensors): it has no jvp formula, so the tangent of its result would be zero. Register "
        f"one with register_jvp({str(definition)!r}, jvp, setup_context=...), or use reverse "
        "mode, such as torch.func.vjp or jacrev."
    )


def refuse_recording(definition: Definition) -> ForwardModeError:
    """The error for a call with tangents that would save residuals, which have none."""
    return ForwardModeError(
        f"{definition} was called with dual tensors that require grad, and its gradient uses "
        "residuals, which would be saved without tangents. Register a formula with "
        f"register_jvp('{definition}__with_residuals', jvp) that returns tangents of the results "
        "and of the residuals, and call torch.func.jvp or hessian in place of dual tensors."
    )
