"""Sharding rules that apply DTensor's own rule for an ATen operator with the same signature."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torchop._compat import dtensor, dtensor_aten
from torchop._compat.dtensor_calls import Call, Row, holds_tensors
from torchop._errors import ShardingRuleError
from torchop._rules.user.sharding import checks
from torchop._rules.user.sharding.derived import ShardingRule
from torchop.extend import OpOverload, Schema, short_repr


def rule(
    op: OpOverload, schema: Schema, aten: object, names: Sequence[str], options: Mapping[str, Any]
) -> ShardingRule:
    what = f"{op.name()}: the sharding rule {short_repr(aten)}"
    if not isinstance(aten, OpOverload) or aten.namespace != "aten":
        raise ShardingRuleError(
            f"{what} is not an overload of an ATen operator, such as "
            f"torch.ops.aten.topk.default. Name one with the signature of {op.name()}, or write "
            f"a rule such as 'b k, k n -> b n'. {checks.IN_DOUBT} Got {schema}."
        )
    if options:
        raise ShardingRuleError(
            f"{op.name()}: whole=, reduce= and linear= are options of a rule that is a string. "
            f"{aten} takes no options."
        )
    keywords = [a.name for a in aten._schema.arguments if a.kwarg_only and holds_tensors(a)]
    if keywords:
        raise ShardingRuleError(
            f"{op.name()}: the sharding rule {aten} takes the tensor {keywords[0]!r} by keyword, "
            "but DTensor does not redistribute such tensors. Give the functional operator the rule "
            "of the functional ATen operator, and derive the form with derive_out. "
            f"{checks.IN_DOUBT} Got {schema}."
        )
    different = dtensor_aten.difference(op, aten)
    if different is not None:
        raise ShardingRuleError(
            f"{op.name()}: the sharding rule {aten} is for an operator with another signature: "
            f"{different}. Give {op.name()} the signature of {aten.name()}, or write a rule such "
            f"as 'b k, k n -> b n'. {checks.IN_DOUBT} Got {schema} and {Schema(aten._schema)}."
        )
    if dtensor.is_imported():
        refused = dtensor_aten.refusal(op, aten)
        if refused is not None:
            raise ShardingRuleError(refused)
    return ShardingRule(functools.partial(_rows, aten), str(aten), tuple(names), aten)


def _rows(aten: OpOverload, op: OpOverload, call: Call) -> list[Row]:
    returns = op._schema.returns
    count = len(call.results) - len(returns)
    if count > 0 and all("List[" not in str(result.real_type) for result in returns):
        raise checks.residuals_error(op, count, str(aten))
    return dtensor_aten.rows_like(op, aten, call)
