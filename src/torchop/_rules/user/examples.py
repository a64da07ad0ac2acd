"""Examples: sample inputs of an operator, for `opcheck` and whatever else wants to call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchop._compat.classes import OpOverload
from torchop._core.registry import OpLike, resolve
from torchop._core.user_rule import Rule, call_signature
from torchop._errors import MissingRuleError, RuleSignatureError
from torchop._schema.callables import check_signature

Example = tuple[tuple[Any, ...], dict[str, Any]]


class _ExamplesRule(Rule[Callable[[], Iterable[Any]]]):
    """A function without parameters, so that each caller gets tensors of its own."""

    def validate(self, op: OpOverload, value: Any) -> Callable[[], Iterable[Any]]:
        check_signature(f"{op.name()}: the function that yields examples", value, ())
        checked: Callable[[], Iterable[Any]] = value
        return checked

    def missing(self, op: OpOverload) -> Callable[[], Iterable[Any]]:
        raise MissingRuleError(
            f"{op.name()} has no examples. Pass sample inputs, or register a function that yields "
            "them as tuples of arguments: op.register_examples(fn), in the class form the member "
            "'examples'."
        )


EXAMPLES = _ExamplesRule("examples")


def make_examples(op: OpLike) -> list[Example]:
    """Makes the examples of an operator anew.

    Returns:
        For each one the positional and the keyword arguments.

    Raises:
        MissingRuleError: none are registered.
        RuleSignatureError: a `TypeError`: one is not a call of the operator.
    """
    given = EXAMPLES.lookup(op)()
    overload = resolve(op, "examples").overload
    if not isinstance(given, Iterable):
        raise RuleSignatureError(
            f"{overload.name()}: the function of examples yields tuples of arguments, got "
            f"{given!r}."
        )
    return [_example(overload, index, example) for index, example in enumerate(given)]


def _example(op: OpOverload, index: int, given: Any) -> Example:
    signature = call_signature(op)
    if isinstance(given, Mapping):
        args, kwargs = (), dict(given)
    elif isinstance(given, (tuple, list)):
        args, kwargs = tuple(given), {}
    else:
        raise RuleSignatureError(
            f"{op.name()}: example {index} is a tuple of positional arguments, or a dict of "
            f"arguments by name; got {type(given).__name__}."
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise RuleSignatureError(
            f"{op.name()}: example {index} is not a call of the operator, which takes {signature}: "
            f"{error}."
        ) from None
    return args, kwargs
