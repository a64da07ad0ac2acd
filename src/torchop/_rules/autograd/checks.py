"""Checks of a registration: whether the operator can have a formula, and of `setup_context`."""

from __future__ import annotations

import torch

from torchop._compat import dispatch
from torchop._core.definition import Definition
from torchop._errors import GradientError, RuleSignatureError
from torchop._rules.effect import EffectRule
from torchop._schema.forms import Form, form_tags
from torchop._schema.schema import TENSOR_LISTS

_DIFFERENTIABLE = TENSOR_LISTS | {"Tensor", "Optional[Tensor]", "Tuple[Tensor]"}


def check_has_gradient(definition: Definition) -> None:
    """Refuses operators for which no formula can be right."""
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
            f"schema {schema}: {problem}. Define a functional operator, which returns fresh "
            "tensors and mutates nothing, and register the formula for that."
        )
    check_tensors(
        definition,
        "register_autograd",
        _DIFFERENTIABLE,
        no_place="backward has no place for their gradients",
        mode="autograd",
    )


def check_no_autograd_function(definition: Definition, backward: object) -> None:
    """Refuses an `autograd.Function`, which is a class, in place of its backward."""
    if isinstance(backward, type) and issubclass(backward, torch.autograd.Function):
        name = backward.__name__
        raise RuleSignatureError(
            f"{definition}: register_autograd expects the function backward(ctx, *grads), got the "
            f"class {name}. Pass {name}.backward, and setup_context={name}.setup_context; what "
            "forward saves on ctx is saved in setup_context."
        )


def check_tensors(
    definition: Definition, caller: str, supported: frozenset[str], *, no_place: str, mode: str
) -> None:
    """Refuses operators with tensors for which a formula has no place."""
    schema = definition.schema
    if schema.keyword_only_tensors:
        raise NotImplementedError(
            f"{definition}: {caller} does not support kwarg-only Tensor args, because {no_place}. "
            f"Make them positional. Got {schema}."
        )
    kinds = (*(argument.kind for argument in schema.arguments), *schema.returns)
    unsupported = [kind for kind in kinds if "Tensor" in kind and kind not in supported]
    if unsupported:
        raise NotImplementedError(
            f"{definition}: {caller} does not support {', '.join(unsupported)}, because {mode} "
            f"cannot follow tensors in there. Use Tensor or Tensor[]. Got {schema}."
        )


def check_derivable(definition: Definition, *, decomposes: bool) -> None:
    """Refuses an operator whose body cannot run again, or has no gradients.

    `decomposes` says that its gradients are those of other operators that its calls consist of.
    """
    schema = definition.schema
    if decomposes or schema.form is Form.OUT:
        problem = (
            "it is a form that writes into its arguments, whose old values are gone in the "
            "backward. Derive the formula of the functional operator: the in-place form of a "
            "family uses that, and forms with out= have no gradients"
        )
    elif schema.is_mutable:
        problem = (
            f"it mutates {', '.join(schema.mutated)}, and its body cannot run again on the "
            "overwritten values. Write a functional operator, and derive its in-place form with "
            "derive_inplace; or write the formula with register_autograd"
        )
    elif schema.is_view:
        problem = (
            "it returns views, which PyTorch tracks by itself. Return fresh tensors, or write the "
            "formula with register_autograd"
        )
    elif not any("Tensor" in kind for kind in schema.returns):
        problem = "it returns no tensor, so it has no gradient"
    elif not any(argument.holds_tensors for argument in schema.positional):
        problem = "it takes no tensor, so it has no gradient"
    elif definition.rule(EffectRule).declared not in (None, "none"):
        problem = (
            "it has an effect, which would happen again when the body runs again. Write the "
            "formula with register_autograd"
        )
    else:
        return
    raise GradientError(
        f"Cannot derive an autograd formula for {definition}: {problem}. Got {schema}."
    )


def check_replaces_no_gradient(definition: Definition) -> None:
    """Refuses a formula for forward mode alone that would replace another library's gradients."""
    for key in ("Autograd", "CompositeImplicitAutograd"):
        if dispatch.has_kernel(str(definition), key):
            raise RuntimeError(
                f"Cannot register jvp for {definition}: it has a kernel at {key}, which computes "
                "its gradients. A formula for forward mode alone would replace that kernel. "
                "Register both formulas: register_autograd(..., jvp=...)."
            )


def _non_functional_problem(definition: Definition) -> str | None:
    """Why no formula can be right for an operator that is not functional."""
    schema = definition.schema
    if schema.form is Form.INPLACE or _is_simple_view(definition):
        return None
    if schema.is_view:
        return "it returns views, and only a view of its one tensor has a gradient"
    if not schema.returns:
        return (
            "it returns nothing, so nothing can have a gradient; in the in-place form "
            "(torch.Tag.inplace), an operator returns what it writes, and that can have one"
        )
    if schema.returns_written:
        # Releases before the tag have no in-place form in libraries.
        tag = (
            ", without the tag that says so (torch.Tag.inplace)" if form_tags(Form.INPLACE) else ""
        )
        return f"it returns what it writes{tag}"
    tensors = [argument for argument in schema.arguments if argument.holds_tensors]
    if schema.is_mutable and all(argument.is_mutated for argument in tensors):
        return "it writes into all of its tensors, and what is overwritten has no gradient"
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
