"""Preconditions: what a caller of an operator may pass, for tests, strategies and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.library

from torchop._core.user_rule import Rule
from torchop._errors import MissingRuleError, RuleSignatureError
from torchop._schema.callables import Registered
from torchop.extend import Operator, OpLike, OpOverload, short_repr

if TYPE_CHECKING:
    from torchop._rules.user.preconditions.declared import Preconditions


class _PreconditionsRule(Rule["Preconditions"]):
    """What is valid, by argument of the schema."""

    def validate(self, op: OpOverload, value: Any) -> Preconditions:
        if not isinstance(value, Mapping):
            raise RuleSignatureError(
                f"{op.name()}: preconditions are a dict that says by the name of an argument what "
                "is valid, such as {'index': torchop.preconditions.Indices('table')}; got "
                f"{short_repr(value)}."
            )
        from torchop._rules.user.preconditions.declared import Preconditions  # few declare any

        return Preconditions(op.name(), Operator(op, self.name).schema, value)

    def missing(self, op: OpOverload) -> Preconditions:
        raise MissingRuleError(
            f"{op.name()} has no preconditions. Say what a caller may pass: "
            "op.register_preconditions({'x': ...}), in the class form the member 'preconditions'."
        )

    def of_derived(self, op: OpOverload, kind: str, origin: OpOverload, value: Any) -> Any:
        return value if kind in ("inplace", "out") else NotImplemented


PRECONDITIONS = _PreconditionsRule("preconditions")


def register_preconditions(
    op: OpLike,
    preconditions: Registered | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Registered:
    """Registers what a caller may pass. Calls do not check it, so it costs them nothing.

    `torchop.testing.check` tries only arguments that the declaration allows, and reports those that
    the operator refuses all the same. If the declaration gives the shape of every tensor, and what
    all other arguments without a default may be, `CustomOp.examples` makes calls from it.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        preconditions: a dict from the name of an argument to a precondition, or to a tuple of
            them, all of which have to hold. A precondition is a constraint on numbers from
            `torch.distributions.constraints`, an object of a class of `torchop.preconditions`, or
            a function that returns whether its arguments are valid, and whose parameters have the
            names of the operator's.
        lib: the library whose lifetime the registration shares; by default it stays as long as
            the operator.

    Returns:
        `preconditions`.
    """
    return PRECONDITIONS.register(op, preconditions, lib=lib)
