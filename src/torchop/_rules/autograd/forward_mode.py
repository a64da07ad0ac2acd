"""Forward-mode differentiation: compute the tangents of an operator's outputs.

If an input has a tangent, torchop calls the operator on the primals (the inputs without their
tangents), calls the forward-mode formula to get the tangents of the outputs, and combines outputs
and tangents into dual tensors. Outer transforms can differentiate these calls like any other calls.

If autograd also records the call for the backward pass, the operator's `autograd.Function` computes
the tangents instead. Forward-over-reverse differentiation requires this, because the saved tensors
must keep their tangents.
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

# A forward-mode formula and its `setup_context`. If the user registered no `setup_context`, the
# second item is None, and calls use the `setup_context` of the backward formula instead. In a
# compiled rule (see `AutogradRule.compile`), the second item is the function to call, always with
# the arguments `(ctx, inputs, keyword_only_inputs, output)`.
Tangents = tuple[Callable[..., Any], Callable[..., Any] | None]


_SUPPORTED = TENSOR_LISTS | {"Tensor", "Optional[Tensor]"}


def check_jvp(definition: Definition, jvp: Callable[..., Any]) -> None:
    schema = definition.schema
    if not schema.is_functional:
        raise RuntimeError(
            f"Cannot register jvp for non-functional operator {definition} with schema {schema}: "
            "forward mode supports fresh outputs only, not mutated arguments or views. Define a "
            "functional operator, register the formula for it, and derive the mutable forms with "
            "derive_inplace() and derive_out()."
        )
    check_tensors(
        definition,
        "register_jvp",
        _SUPPORTED,
        reason="jvp does not receive their tangents",
        mode="forward mode",
    )
    tangents = (f"tangent_of_{argument.name}" for argument in schema.positional)
    check_signature(f"{definition}: jvp", jvp, ("ctx", *tangents))


class ForwardContext(FunctionCtx):
    """The `ctx` that a forward-mode formula receives.

    Unlike the `ctx` of a backward formula, this object is not an autograd node. `needs_input_grad`
    says for each input whether it has a tangent, and contains a list of bools for each list of
    tensors.
    """

    # Default values of the attributes that the methods of the base class `FunctionCtx` set.
    to_save: Any = ()
    saved_for_forward: Any = None
    non_differentiable: Any = ()
    materialize_grads = True

    def __init__(self, needs_input_grad: tuple[Any, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> Any:
        # A `setup_context` that the backward formula also uses may have called `save_for_backward`
        # instead of `save_for_forward`, so fall back to these tensors.
        return self.to_save if self.saved_for_forward is None else self.saved_for_forward


def _materialized(ctx: ForwardContext, primal: Any, tangent: Tensor | None) -> Tensor | None:
    if tangent is None and ctx.materialize_grads and is_differentiable(primal):
        return torch.zeros_like(primal)
    return tangent


def has_tangents(values: Sequence[Any]) -> bool:
    """Return whether any tensor in `values` has a tangent.

    Must be called inside a `torch.autograd.forward_ad.dual_level()`.
    """
    return any(autograd.unpack_dual(tensor)[1] is not None for tensor in tensors_in(values))


def differentiate(
    definition: Definition, rule: Tangents, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call whose inputs have tangents, and return dual tensors.

    If the call also needs a gradient, the operator's `autograd.Function` must compute the tangents
    instead.
    """
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
    """Call the forward-mode formula and return the tangents of the outputs.

    The returned list is flat: each tensor in a list of tensors has its own entry, and an output
    without a tangent has the entry None.
    """
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
    # Clone tangents that alias the tangent of an input, because an in-place operation on an output
    # also changes the output's tangent, and must not change the input's tangent along with it.
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
            # PyTorch drops the tangents because of pytorch/pytorch#187284.
            f"{definition} was called with dual tensors in a compiled function, where PyTorch "
            "drops their tangents. Call torch.func.jvp inside the function, or use dual tensors "
            "outside of it."
        )


def _checked(
    definition: Definition, ctx: ForwardContext, outputs: tuple[Any, ...], returned: Any
) -> list[Any]:
    tangents = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(outputs) == 1 and isinstance(outputs[0], list):
        is_wrapped = len(tangents) == 1 and (tangents[0] is None or isinstance(tangents[0], list))
        tangents = tangents if is_wrapped else (list(tangents),)
    if len(tangents) != len(outputs):
        raise GradientError(
            f"{definition}: jvp returned an incorrect number of tangents (expected "
            f"{len(outputs)}, got {len(tangents)}). Return one tangent or None for each output."
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
    expected = f"a tensor of shape {list(output.shape)} and {output.dtype}, or None"
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


def unsupported(definition: Definition) -> ForwardModeError:
    return ForwardModeError(
        f"{definition} does not support forward-mode differentiation (torch.func.jvp, jacfwd, dual "
        "tensors): it has no jvp formula, so the tangent of the result would be zero. Register "
        f"one with register_jvp({str(definition)!r}, jvp, setup_context=...), or use reverse "
        "mode, such as torch.func.vjp or jacrev."
    )


def residuals_unsupported(definition: Definition) -> ForwardModeError:
    return ForwardModeError(
        f"{definition} was called with dual tensors that require grad, but the gradient uses "
        "residuals, and residuals have no tangents. Register a formula with "
        f"register_jvp('{definition}__with_residuals', jvp) that returns the tangents of results "
        "and residuals, and call torch.func.jvp or hessian instead of using dual tensors."
    )
