"""Residuals: additional results of a kernel that only the backward pass uses."""

from __future__ import annotations

from torchop._core.registry import OpLike, op_name, own_definition
from torchop._rules.residuals.annotation import Residuals as Residuals
from torchop._rules.residuals.handover import records_gradient as records_gradient
from torchop._rules.residuals.handover import residuals as residuals


def residual_count(op: OpLike) -> int:
    """Return an operator's number of residuals (kernel outputs for the backward pass).

    Each tensor in a structure counts separately.
    """
    definition = own_definition(None, op_name(op, "residual_count"))
    declared = None if definition is None else definition.declaration.residuals
    return 0 if declared is None else len(declared.schema.returns)
