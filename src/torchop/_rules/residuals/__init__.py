"""Residuals: what kernels return for the backward alone, and callers do not see."""

from __future__ import annotations

from typing import Any

from torchop._core import declaration
from torchop._rules.residuals.handover import records_gradient as records_gradient
from torchop._rules.residuals.handover import residuals as residuals
from torchop._schema.naming import OpName


def _declare(name: OpName, types: Any) -> Any:
    from torchop._rules.residuals.declared import Declared  # most programs have none

    return Declared(name, types)


declaration.declare_residuals = _declare
