"""Check and wrap user functions that take an operator's arguments, such as cost formulas."""

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
    """Return the parameters of an operator as its author wrote them.

    They differ from the arguments of the schema if the operator takes structured arguments, such as
    dataclasses.
    """
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
    """Raise an error unless a function takes the operator's arguments.

    Args:
        what: a description of the function for messages, such as `"ns::name: a cost"`.
        op: the operator, an `OpOverload`.
        function: the user's function.
        leading: the names of additional parameters that `function` has before the operator's
            arguments.
        without_first: whether `function` omits the operator's first argument, as the inverse of an
            operator does.

    Raises:
        RuleSignatureError: the function takes different arguments, or is not callable. This error
            is a `TypeError`.

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
    """Wrap a user's function that takes an operator's arguments, so that PyTorch can call it.

    PyTorch omits arguments that equal their default, so the wrapper fills them in. If the operator
    takes structured arguments, such as dataclasses, the wrapper also rebuilds the objects from the
    values that PyTorch passes.

    Args:
        what: a description of the function for messages, such as `"ns::name: a cost"`.
        op: the operator, an `OpOverload`.
        function: the user's function.
        leading: the names of additional parameters that `function` has before the operator's
            arguments.
        result: the name of the keyword argument for the operator's result. The result is passed
            only if `function` has a parameter with this name.

    Returns:
        A function for PyTorch to call.

    Raises:
        RuleSignatureError: the function takes different arguments, or is not callable. This error
            is a `TypeError`.

    Example:
        >>> import torch
        >>> from torchop.extend import observer
        >>> def cost(x, other, alpha):
        ...     return 1 if alpha == 1 else 2
        >>> adapted = observer("aten::add: a cost", torch.ops.aten.add.Tensor, cost)
        >>> adapted(torch.ones(1), torch.ones(1))
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

    def adapted(*args: Any, **kwargs: Any) -> Any:
        passed = {} if result is None else {result: convention.result(kwargs.pop(result))}
        filled, keywords = schema.fill_defaults(args[len(leading) :], kwargs)
        filled, keywords = convention.arguments(filled, keywords)
        if takes_result:
            keywords |= passed
        return function(*args[: len(leading)], *filled, **keywords)

    return adapted


def _names(op: OpOverload) -> tuple[list[str], list[str]]:
    parameters = call_signature(op).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY], keywords
