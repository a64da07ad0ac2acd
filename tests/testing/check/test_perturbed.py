"""When a check changes an example's values, `valid` must accept the new values.

Uses private names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchop
from torchop.testing._check.run import plan_checks, run_check

X = torch.tensor([[4.0, 2.0, 1.5], [8.0, 3.0, 2.5]])


def is_descending(x: Tensor, factor: float = 2.0) -> bool:
    """Accept only rows of descending numbers, so rotated, negated and shifted rows are rejected."""
    if x.dim() != 2 or not x.numel() or not x.is_floating_point() or factor != 2.0:
        return False
    return bool((x > 1).all() and (x[:, 1:] < x[:, :-1]).all() and (x < 9).all())


def test_probes_pass_only_valid_values(namespace: str) -> None:
    violations: list[Tensor] = []
    op = torchop.custom_op(
        f"{namespace}::scaled",
        _watched(violations),
        mutates_args=(),
        schema="(Tensor x, float factor=2.0) -> Tensor",
    )
    op.register_fake(lambda x, factor=2.0: torch.empty_like(x))
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.factor, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )
    op.register_vmap(lambda info, dims, x, factor: (op(x.movedim(dims[0], 0), factor), 0))
    op.register_kernel("cpu", _watched(violations), provider="fast")
    op.register_examples(lambda: [(X, 2.0)], valid=is_descending)
    outcomes: dict[str, str] = {}
    found: dict[str, Tensor] = {}
    for check in plan_checks(op):
        if not check.kind.is_costly:
            violations.clear()
            result = run_check(check)
            outcomes[check.name] = result.outcome
            assert result.outcome != "failed", f"{check.name}: {result.message}"
            if violations:
                found[check.name] = violations[0]
    assert found == {}
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert {
        "contracts.state",
        "dtypes.numbers",
        "subsystems.gradcheck",
        "subsystems.vmap",
        "subsystems.func",
        "subsystems.threads",
        "subsystems.autocast",
    } <= passed


def _watched(violations: list[Tensor]) -> Any:
    """Return a kernel that adds its argument to `violations` if `valid` rejects the argument."""

    def kernel(x: Tensor, factor: float = 2.0) -> Tensor:
        # Under vmap, `x` has one or two batch dimensions.
        batch = x.flatten(0, -3) if x.dim() > 2 else x[None]
        violations.extend(rows.clone() for rows in batch if not is_descending(rows, factor))
        return x * factor

    return kernel
