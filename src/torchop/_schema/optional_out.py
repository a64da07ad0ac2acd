"""Reject maybe-out operators: they return the argument `out` if it is given, or else a new tensor.

A schema cannot say that a result aliases an argument in some calls only, so `check_maybe_out`
rejects any alias between a result and a mutated `Tensor?`. If the author leaves the alias out of
the schema, a call that returns the argument raises an error.
"""

from __future__ import annotations

from torchop._compat.classes import FunctionSchema
from torchop._errors import mistake

WHY_AND_FIX = (
    "Whether such a result is fresh depends on the arguments, and a schema cannot express that. "
    "Split it into two operators: one that always allocates, and one with out=. torchop.out_op "
    "defines both from a kernel that writes into out, and torchop.maybe_out combines both into one "
    "Python function with out=None."
)


def check_maybe_out(parsed: FunctionSchema) -> None:
    returned = {
        alias
        for result in parsed.returns
        if result.alias_info is not None
        for alias in result.alias_info.before_set
    }
    for argument in parsed.arguments:
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and str(argument.real_type) == "Optional[Tensor]"
            and returned & argument.alias_info.before_set
        ):
            raise mistake(
                f"the operator is maybe-out: it returns the mutated argument {argument.name!r}, or "
                f"another tensor if the argument is None. {WHY_AND_FIX} Got {parsed}."
            )
