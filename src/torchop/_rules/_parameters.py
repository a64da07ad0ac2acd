"""The parameters of an operator, as its callers pass them, and whether a function takes them."""

from __future__ import annotations

import inspect
from typing import Any

from torchop._compat.classes import OpOverload
from torchop._resolve import op_name, own_definition
from torchop._schema.callables import check_signature
from torchop._schema.schema import Schema


def call_signature(op: OpOverload) -> inspect.Signature:
    """The parameters with which an operator is called, and their defaults."""
    definition = own_definition(op, op_name(op, "call_signature"))
    if definition is not None and definition.function is not None:
        try:
            structure = definition.structure
            return inspect.signature(
                definition.function if structure is None else structure.function
            )
        except (TypeError, ValueError):  # a builtin, whose schema was written by hand
            pass
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY
                if argument.keyword_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default if argument.has_default else inspect.Parameter.empty,
            )
            for argument in Schema(op._schema).arguments
        ]
    )


def check_arguments(
    what: str,
    op: OpOverload,
    function: Any,
    *,
    leading: tuple[str, ...] = (),
    without_first: bool = False,
) -> None:
    """Refuses a function that does not take the operator's arguments.

    Args:
        what: for the message.
        op: the operator.
        function: what is to be called with them.
        leading: what comes before them.
        without_first: whether the first argument is left out.

    Raises:
        RuleSignatureError: a `TypeError`.
    """
    parameters = call_signature(op).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    check_signature(
        what,
        function,
        (*leading, *positional[int(without_first) :]),
        (p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
    )
