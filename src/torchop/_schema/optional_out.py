"""Maybe-out operators: those that return their `out` argument, or allocate where it is None.

Whether the result of such an operator is fresh depends on its arguments, and no schema can say
that. A schema that aliases a result with a mutated `Tensor?` is rejected here. Without the alias,
the operator may be correct, so the result check of each call decides (`contract.alias_error`).
"""

from __future__ import annotations

from torchop._compat.classes import FunctionSchema
from torchop._errors import SchemaError

WHY_AND_FIX = (
    "Whether such a result is fresh depends on the arguments, and no schema can say that. Make it "
    "two operators: one that always allocates, and one with out=. torchop.out_op makes both of a "
    "kernel that writes into out, and torchop.maybe_out makes one Python function of both, with "
    "out=None."
)


def check_maybe_out(name: object, parsed: FunctionSchema) -> None:
    """Reject a schema in which a result aliases a mutated optional tensor.

    Raises:
        SchemaError: names the argument, and how to define two operators instead.
    """
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
            raise SchemaError(
                f"{name} is maybe-out: it may return its mutated argument {argument.name!r}, or "
                f"another tensor where that is None. {WHY_AND_FIX} Got {parsed}."
            )
