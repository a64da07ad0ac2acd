"""Deriving a formula, and the operators that can have one."""

from __future__ import annotations

from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError, short_repr
from torchop._rules.autograd.derived.backward import DerivedBackward
from torchop._rules.autograd.derived.graph_operators import operators_for_graphs
from torchop._rules.autograd.formula import STRATEGIES
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.effect import EffectRule
from torchop._schema.forms import Form


def derived_backward(definition: Definition, strategy: str) -> DerivedBackward:
    """Makes the derived formula of an operator that `check_derivable` accepts."""
    return DerivedBackward(definition, strategy, operators_for_graphs(definition))


def check_derivable(definition: Definition, strategy: object) -> None:
    """Refuses an operator whose body cannot run again, or has no gradients."""
    if strategy not in STRATEGIES:
        raise ValueError(
            f'{definition}: derive_autograd expects strategy="recompute" or "save", got '
            f"{short_repr(strategy)}."
        )
    schema = definition.schema
    if definition.rule(AutogradRule).decomposition is not None or schema.form is Form.OUT:
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
    raise DerivedFormulaError(
        f"Cannot derive an autograd formula for {definition}: {problem}. Got {schema}."
    )
