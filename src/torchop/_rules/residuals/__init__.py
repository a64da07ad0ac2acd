"""Residuals: what kernels return for the backward alone, and callers do not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchop._core import declaration
from torchop._core.definition import Definition
from torchop._core.registry import OpLike, op_name, own_definition
from torchop._rules.autograd import register
from torchop._rules.residuals.annotation import Residuals as Residuals
from torchop._rules.residuals.annotation import declared_types
from torchop._rules.residuals.handover import apart
from torchop._rules.residuals.handover import records_gradient as records_gradient
from torchop._rules.residuals.handover import residuals as residuals
from torchop._schema.naming import OpName


def _declare(name: OpName, function: Callable[..., Any], types: Mapping[str, Any] | None) -> Any:
    types = declared_types(name, function, types)
    if types is None:
        return None
    from torchop._rules.residuals.declared import Declared  # most programs have none

    return Declared(name, types)


def _formula_of_kernel(definition: Definition, kernel: Callable[..., Any]) -> Any:
    from torchop._rules.residuals.backward_kernel import BackwardKernel  # for the same reason

    return BackwardKernel(definition, kernel).formula()


def residual_count(op: OpLike) -> int:
    """How many residuals an operator has, as graphs have them; 0 for those of others."""
    definition = own_definition(None, op_name(op, "residual_count"))
    declared = None if definition is None else definition.declaration.residuals
    return 0 if declared is None else len(declared.schema.returns)


Definition.apart = apart
declaration.declare_residuals = _declare
register.formula_of_kernel = _formula_of_kernel
