"""Examples: sample inputs of an operator, for `opcheck` and other tools."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.library

from torchop._core.user_rule import Rule
from torchop._errors import MissingRuleError, RuleSignatureError
from torchop._rules.user import preconditions as preconditions  # for the table of registrations
from torchop._schema.callables import Function, Lambda, check_signature
from torchop.extend import Operator, OpLike, OpOverload, short_repr

Example = tuple[tuple[Any, ...], dict[str, Any]]


class _ExamplesRule(Rule[Callable[[], Iterable[Any]]]):
    """A function without parameters, so that each caller gets tensors of its own."""

    def validate(self, op: OpOverload, value: Any) -> Callable[[], Iterable[Any]]:
        check_signature(f"{op.name()}: the function that yields examples", value, ())
        checked: Callable[[], Iterable[Any]] = value
        return checked

    def missing(self, op: OpOverload) -> Callable[[], Iterable[Any]]:
        problem = ""
        if preconditions.PRECONDITIONS.has(op) and not Operator(op, "examples").takes_structures:
            from torchop._rules.user.preconditions.base import Unfit  # few declare any

            try:
                examples = preconditions.PRECONDITIONS.lookup(op).generated()
            except Unfit as error:
                problem = f" Its preconditions are not enough to make some: {error}."
            else:
                return lambda: copy.deepcopy(examples)
        raise MissingRuleError(
            f"{op.name()} has no examples.{problem} Pass sample inputs, or register a function "
            "that yields them as tuples of arguments: op.register_examples(fn), in the class form "
            "the member 'examples'."
        )


EXAMPLES = _ExamplesRule("examples")


def register_examples(
    op: OpLike, fn: Function | Lambda | None = None, /, *, lib: torch.library.Library | None = None
) -> Function:
    """Registers sample inputs, which `opcheck` uses if you pass none.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: takes nothing and yields examples, each a tuple of positional arguments or a dict of
            arguments by name. It is called again whenever examples are needed.
        lib: the library whose lifetime the registration shares; by default it stays as long as
            the operator.

    Returns:
        `fn`; without it, a decorator.
    """
    return EXAMPLES.register(op, fn, lib=lib)


def make_examples(op: OpLike) -> list[Example]:
    """Makes the registered sample inputs or, without any, some that fit the preconditions.

    Returns:
        For each example the positional arguments, a tuple, and those by keyword, a dict.

    Raises:
        MissingRuleError: none were registered, and none can be made from preconditions.
        RuleSignatureError: a `TypeError`: one of them is not a call of the operator.
        ValueError: one of them breaks the preconditions (`register_preconditions`).
    """
    examples = EXAMPLES.lookup(op)()
    overload = Operator(op, "examples").overload
    if not isinstance(examples, Iterable):
        raise RuleSignatureError(
            f"{overload.name()}: the function of examples yields tuples of arguments, got "
            f"{short_repr(examples)}."
        )
    return [_example(overload, index, example) for index, example in enumerate(examples)]


def operator_of_examples(op: OpLike, caller: str) -> Operator:
    """The operator as its registered examples call it: by its handle, which may take structures."""
    return Operator(Operator(op, caller).handle or op, caller)


def _example(op: OpOverload, index: int, example: Any) -> Example:
    signature = Operator(op, "examples").signature
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
    if preconditions.PRECONDITIONS.has(op):
        called = operator_of_examples(op, "examples")
        declared = preconditions.PRECONDITIONS.lookup(op)
        problem = declared.problem(declared.arguments(*called.flat_arguments(args, kwargs)))
        if problem is not None:
            raise ValueError(
                f"{op.name()}: example {index} breaks the preconditions: {problem}. Change it, or "
                "what register_preconditions says."
            )
    return args, kwargs
