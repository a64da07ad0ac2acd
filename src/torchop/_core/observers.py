"""Functions that get the arguments of a call, such as a vmap rule or a fake kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torchop._compat.classes import OpOverload
from torchop._core.registry import op_name, own_definition
from torchop._schema.callables import accepts, check_signature
from torchop._schema.convention import FLAT
from torchop._schema.schema import Schema


def call_signature(op: OpOverload) -> inspect.Signature:
    """The parameters with which an operator is called, and their defaults."""
    definition = own_definition(op, op_name(op, "call_signature"))
    if definition is not None and definition.structure is not None:
        return inspect.signature(definition.authors_function)
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
    """Refuses a function that cannot be called with the operator's arguments.

    Args:
        what: what the message calls the function, such as `"ns::name: a cost"`.
        op: the operator, an `OpOverload`.
        function: what was registered.
        leading: names of arguments that come before those of the operator.
        without_first: whether the first argument of the operator is left out.

    Raises:
        RuleSignatureError: a `TypeError`: the function takes other arguments, or is none.

    Example:
        >>> import torch
        >>> from torchop.extend import check_arguments
        >>> check_arguments("aten::sin: a cost", torch.ops.aten.sin.default, lambda x: 1)
    """
    positional, keywords = _names(op)
    check_signature(what, function, (*leading, *positional[int(without_first) :]), keywords)


def observer(
    what: str,
    op: OpOverload,
    function: Any,
    *,
    leading: tuple[str, ...] = (),
    result: str | None = None,
) -> Callable[..., Any]:
    """Makes a function of the operator's arguments one that PyTorch can ask about a call.

    PyTorch has the arguments of the schema, without those that equal their default. `function` gets
    `leading` and all of them; of an operator with structured arguments, it gets the structures, in
    which what PyTorch passes for a tensor, such as its shape, stands in the place of the tensor.

    Args:
        what: what messages call the function, such as `"ns::name: a cost"`.
        op: the operator, an `OpOverload`.
        function: what was registered.
        leading: names of arguments that come before those of the operator.
        result: the name by which PyTorch passes the result too, if it does; `function` gets it if
            it can.

    Returns:
        A function of what PyTorch passes.

    Raises:
        RuleSignatureError: a `TypeError`: the function takes other arguments, or is none.

    Example:
        >>> import torch
        >>> from torchop.extend import observer
        >>> def cost(x, other, alpha):
        ...     return 1 if alpha == 1 else 2
        >>> ask = observer("aten::add: a cost", torch.ops.aten.add.Tensor, cost)
        >>> ask(torch.ones(1), torch.ones(1))
        1
    """
    positional, keywords = _names(op)
    takes_result = (
        result is not None
        and callable(function)
        and accepts(function, (*leading, *positional), (*keywords, result))
    )
    if not takes_result:
        check_signature(what, function, (*leading, *positional), keywords)
    definition = own_definition(op, op_name(op, what))
    convention = FLAT if definition is None else definition.convention
    schema = Schema(op._schema) if definition is None else definition.schema

    def ask(*args: Any, **kwargs: Any) -> Any:
        passed = {} if result is None else {result: convention.result(kwargs.pop(result))}
        filled, keywords = schema.fill_defaults(args[len(leading) :], kwargs)
        filled, keywords = convention.arguments(filled, keywords)
        if takes_result:
            keywords |= passed
        return function(*args[: len(leading)], *filled, **keywords)

    return ask


def _names(op: OpOverload) -> tuple[list[str], list[str]]:
    """The names of the arguments that can be passed by position, and of the others."""
    parameters = call_signature(op).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY], keywords
