from __future__ import annotations

import torch

from torchop._compat import dispatch
from torchop._core.definition import Definition
from torchop._errors import GradientError, RuleSignatureError
from torchop._rules.effect import EffectRule
from torchop._schema.forms import Form
from torchop._schema.schema import TENSOR_LISTS

_DIFFERENTIABLE = TENSOR_LISTS | {"Tensor", "Optional[Tensor]", "Tuple[Tensor]"}


def check_has_gradient(definition: Definition) -> None:
    schema = definition.schema
    if schema.form is Form.OUT:
        raise RuntimeError(
            "Cannot register autograd formula for operator tagged with torch.Tag.out: "
            f"{definition}. Out variants do not support autograd, like PyTorch's own; register the "
            "formula for the functional operator."
        )
    problem = _non_functional_problem(definition)
    if problem is not None:
        raise RuntimeError(
            f"Cannot register autograd formula for non-functional operator {definition} with "
            f"schema {schema}: {problem}. Register the formula for a functional operator: one that "
            "returns fresh tensors and mutates nothing."
        )
    check_tensors(
        definition,
        "register_autograd",
        _DIFFERENTIABLE,
        reason="backward cannot return their gradients",
        mode="autograd",
    )


def check_no_autograd_function(definition: Definition, backward: object) -> None:
    if isinstance(backward, type) and issubclass(backward, torch.autograd.Function):
        name = backward.__name__
        raise RuleSignatureError(
            f"{definition}: register_autograd expects the function backward(ctx, *grads), got the "
            f"class {name}. Pass {name}.backward and setup_context={name}.setup_context, and move "
            "ctx.save_for_backward(...) from forward to setup_context."
        )


def check_tensors(
    definition: Definition, caller: str, supported: frozenset[str], *, reason: str, mode: str
) -> None:
    schema = definition.schema
    if schema.keyword_only_tensors:
        raise NotImplementedError(
            f"{definition}: {caller} does not support kwarg-only Tensor args, because {reason}. "
            f"Make them positional. Got {schema}."
        )
    kinds = (*(argument.kind for argument in schema.arguments), *schema.returns)
    unsupported = [kind for kind in kinds if "Tensor" in kind and kind not in supported]
    if unsupported:
        raise NotImplementedError(
            f"{definition}: {caller} does not support {', '.join(unsupported)}, because {mode} "
            f"does not see tensors in these types. Use Tensor or Tensor[]. Got {schema}."
        )


def check_derivable(definition: Definition, *, decomposes: bool) -> None:
    """Raise GradientError if a backward formula cannot be derived from the operator's kernel.

    `decomposes` is true for an in-place or out= operator that torchop derived from a functional
    operator.
    """
    schema = definition.schema
    if decomposes or schema.form is Form.OUT:
        problem = (
            "it overwrites arguments, so the old values are not available in the backward. Derive "
            "the formula of the functional operator instead. The in-place form uses it too, and "
            "out= forms have no gradients"
        )
    elif schema.is_mutable:
        problem = (
            f"it mutates {', '.join(schema.mutated)}, so the body cannot run again on the original "
            "values. Write a functional operator and derive the in-place form with "
            "derive_inplace, or write the formula with register_autograd"
        )
    elif schema.is_view:
        problem = (
            "it returns views, and PyTorch itself differentiates views. Return fresh tensors, or "
            "write the formula with register_autograd"
        )
    elif not any("Tensor" in kind for kind in schema.returns):
        problem = "it returns no tensor, so it has no gradient"
    elif not any(argument.holds_tensors for argument in schema.positional):
        problem = "it takes no tensor, so it has no gradient"
    elif definition.rule(EffectRule).declared not in (None, "none"):
        problem = (
            "it has an effect, and the effect would happen again when the backward runs the body "
            "again. Write the formula with register_autograd"
        )
        if schema.objects:
            problem += ', or pass effects="none" to custom_op if the body changes no object'
    else:
        return
    raise GradientError(
        f"Cannot derive an autograd formula for {definition}: {problem}. Got {schema}."
    )


def check_replaces_no_gradient(definition: Definition) -> None:
    for key in ("Autograd", "CompositeImplicitAutograd"):
        if dispatch.has_kernel(str(definition), key):
            raise RuntimeError(
                f"Cannot register jvp for {definition}: without a backward formula, this would "
                f"remove the gradients that the kernel at {key} computes. Register both formulas: "
                "register_autograd(..., jvp=...)."
            )


def _non_functional_problem(definition: Definition) -> str | None:
    schema = definition.schema
    if schema.form is Form.INPLACE or _is_simple_view(definition):
        return None
    if schema.is_view:
        return "it returns views, and only a single view of a single tensor argument has a gradient"
    if not schema.returns:
        return (
            "it returns nothing, so it has no gradient. An operator in the in-place form "
            "(torch.Tag.inplace) returns the tensor that it mutates, and can have one"
        )
    if schema.returns_written:
        # torch.Tag.inplace exists only since PyTorch 2.13, so the message omits the tag on older
        # releases.
        tag = " without being tagged as in-place (torch.Tag.inplace)" if Form.INPLACE.tags else ""
        return f"it returns a tensor that it mutates{tag}"
    tensors = [argument for argument in schema.arguments if argument.holds_tensors]
    if schema.is_mutable and all(argument.is_mutated for argument in tensors):
        return "it mutates all tensor arguments, and overwritten values have no gradient"
    return None


def _is_simple_view(definition: Definition) -> bool:
    schema = definition.schema
    tensors = [argument for argument in schema.arguments if argument.kind == "Tensor"]
    return (
        definition.is_ours
        and schema.is_view
        and len(tensors) == 1
        and schema.returns == ("Tensor",)
    )
