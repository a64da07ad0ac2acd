"""Examples: sample inputs of an operator, for `opcheck` and other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchop._compat.classes import OpOverload
from torchop._core.observers import call_signature
from torchop._core.registry import OpLike, resolve
from torchop._core.user_rule import Rule
from torchop._errors import MissingRuleError, RuleSignatureError, short_repr
from torchop._rules.user.handle_method import handle_method
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


@handle_method(EXAMPLES)
def register_examples(fn: Callable[[], Iterable[Any]], /) -> object:
    """Registers sample inputs, which `opcheck` uses if you pass none.

    Args:
        fn: takes nothing and yields examples, each a tuple of positional arguments or a dict of
            arguments by name. It is called again whenever examples are needed.
    """
    return fn


def make_examples(op: OpLike) -> list[Example]:
    """Makes the sample inputs that were registered.

    Returns:
        For each example the positional arguments, a tuple, and those by keyword, a dict.

    Raises:
        MissingRuleError: none were registered.
        RuleSignatureError: a `TypeError`: one of them is not a call of the operator.
    """
    examples = EXAMPLES.lookup(op)()
    overload = resolve(op, "examples").overload
    if not isinstance(examples, Iterable):
        raise RuleSignatureError(
            f"{overload.name()}: the function of examples yields tuples of arguments, got "
            f"{short_repr(examples)}."
        )
    return [_example(overload, index, example) for index, example in enumerate(examples)]


def _example(op: OpOverload, index: int, example: Any) -> Example:
    signature = call_signature(op)
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    elif isinstance(example, (tuple, list)):
        args, kwargs = tuple(example), {}
    else:
        raise RuleSignatureError(
            f"{op.name()}: example {index} is a tuple of positional arguments, or a dict of "
            f"arguments by name; got {type(example).__name__}."
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise RuleSignatureError(
            f"{op.name()}: example {index} is not a call of the operator, which takes {signature}: "
            f"{error}."
        ) from None
    return args, kwargs
