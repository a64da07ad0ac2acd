"""The sharding of in-place forms, and of forms with `out=`: by the rule of the functional operator.

A form computes the same as the functional operator and copies the result. So each rank can write
its part if the written tensor has the placement of the result.
"""

from __future__ import annotations

from torchop._compat.classes import OpOverload
from torchop._compat.dtensor import Call, Row
from torchop._core.definition import Definition
from torchop._rules.user.sharding.rule import SHARDING, ShardingRule
from torchop._schema.forms import Form


class OfForm(ShardingRule):
    """The rule of a form: that of the functional operator, whose results are written."""

    def __init__(self, functional: OpOverload, rule: ShardingRule) -> None:
        self._functional = functional
        self._rule = rule
        self.unhashed = rule.unhashed
        self.cached = rule.cached


class OfInplace(OfForm):
    """The placements with which the result is where the first argument is."""

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        inputs = [each._replace(is_written=False) for each in call.inputs]
        rows = self._rule.rows(self._functional, call._replace(inputs=inputs))
        return [row for row in rows if row.results[0] == row.inputs[0]]


class OfOut(OfForm):
    """The placements of the functional operator, and for each output that of its result."""

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        # The outputs come last in the schema, so they are the last inputs.
        inputs = [each for each in call.inputs if not each.is_written]
        names = {argument.name for argument in self._functional._schema.arguments}
        kwargs = {name: value for name, value in call.kwargs.items() if name in names}
        rows = self._rule.rows(self._functional, call._replace(inputs=inputs, kwargs=kwargs))
        return [row._replace(inputs=[*row.inputs, *row.results]) for row in rows]


def follow_functional(functional: Definition, form: Definition) -> None:
    """Gives a form the rule of its functional operator, also if that is registered later."""
    rule = OfInplace if form.schema.form is Form.INPLACE else OfOut
    SHARDING.follow(form, functional, rule)
