"""Residuals: what kernels return for the backward alone, and callers do not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._core import declaration
from torchop._core.definition import Definition
from torchop._rules.autograd import register
from torchop._rules.residuals.handover import records_gradient as records_gradient
from torchop._rules.residuals.handover import residuals as residuals
from torchop._schema.naming import OpName


def _declare(name: OpName, types: Any) -> Any:
    from torchop._rules.residuals.declared import Declared  # most programs have none

    return Declared(name, types)


def _formula_of_kernel(definition: Definition, kernel: Callable[..., Any]) -> Any:
    from torchop._rules.residuals.backward_kernel import BackwardKernel  # for the same reason

    return BackwardKernel(definition, kernel).formula()


declaration.declare_residuals = _declare
register.formula_of_kernel = _formula_of_kernel
