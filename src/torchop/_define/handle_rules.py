"""The part of a handle that registers rules of the public kind, `torchop.Rule`."""

from __future__ import annotations

import functools
import typing
from typing import Any

from torchop._core.definition import Definition
from torchop._core.user_rule import get_rule, rule_names
from torchop._errors import short_repr
from torchop._rules.user import ShippedRules
from torchop._schema.callables import Registered


class RuleMethods(ShippedRules):
    """The methods of `CustomOp` for rules of `torchop.Rule`."""

    _definition: Definition

    def _live(self) -> Definition:
        self._definition.check_defined()
        return self._definition

    def register(self, rule: str, value: Registered | None = None, /) -> Registered:
        """Registers a value under a `torchop.Rule`.

        `op.register("cost", fn)` is also written `op.register_cost(fn)`.

        Args:
            rule: the name of a rule of torchop or of another package.
            value: what the rule accepts, usually a function; without it, a decorator is returned.

        Returns:
            `value`.

        Raises:
            RuleNameError: a `ValueError`: there is no such rule.
            TypeError, ValueError: the rule refuses the value.
        """
        self._live()
        return get_rule(rule).register(self, value)

    if not typing.TYPE_CHECKING:  # a checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """The method `register_<name>` of a rule that another package made."""
            kind, _, rule = name.partition("register_")
            if kind or rule not in rule_names():
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {short_repr(name)}",
                    name=name,
                    obj=self,
                )
            return functools.partial(self.register, rule)
