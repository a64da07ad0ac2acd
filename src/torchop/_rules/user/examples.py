"""Examples: sample inputs that an operator's author registers for `opcheck` and other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch.library

from torchop._core.user_rule import Rule
from torchop._errors import MissingRuleError, RuleSignatureError
from torchop._schema.callables import Function, Lambda, check_signature
from torchop.extend import Operator, OpLike, OpOverload, observer, short_repr

Example = tuple[tuple[Any, ...], dict[str, Any]]
Valid = Callable[..., bool]


class Examples(NamedTuple):
    """The sample inputs of an operator.

    Each call of `make` yields the examples with new tensors. `valid` takes the operator's arguments
    and returns whether the operator accepts them. If `valid` is None, the operator accepts all
    arguments.
    """

    make: Callable[[], Iterable[Any]]
    valid: Valid | None = None


class _ExamplesRule(Rule[Examples]):
    def validate(self, op: OpOverload, value: Any, *, valid: Any = None) -> Examples:
        check_signature(f"{op.name()}: the function that yields examples", value, ())
        if valid is not None:
            valid = observer(f"{op.name()}: 'valid' of the examples", op, valid)
        return Examples(value, valid)

    def missing(self, op: OpOverload) -> Examples:
        raise MissingRuleError(
            f"{op.name()} has no examples. Pass sample inputs, or register a function "
            "that yields them as tuples of arguments: op.register_examples(fn), in the class form "
            "the member 'examples'."
        )

    def valid(self, op: OpOverload) -> Valid | None:
        """Return the `valid` function for an operator, or None if all arguments are valid.

        An in-place or out= operator that was derived from a functional operator uses the functional
        operator's `valid` function, unless the user registered one for the derived operator.
        """
        own = self.lookup(op).valid if self.has(op) else None
        if own is not None:
            return own
        origin, kind = self.origin(op) or (op, "")
        valid = self.valid(origin) if kind in ("inplace", "out") else None
        if valid is None or kind == "inplace":
            return valid
        names = {argument.name for argument in Operator(origin, "examples").schema.arguments}

        def without_out(*args: Any, **kwargs: Any) -> bool:
            return valid(*args, **{name: kwargs[name] for name in kwargs if name in names})

        return without_out


EXAMPLES = _ExamplesRule("examples")


def register_examples(
    op: OpLike,
    fn: Function | Lambda | None = None,
    /,
    *,
    valid: Valid | None = None,
    lib: torch.library.Library | None = None,
) -> Function:
    """Register sample inputs that `opcheck` and `torchop.testing.check` use by default.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: a function without parameters that yields examples. Each example is a tuple of
            positional arguments, or a dict from argument names to values. Tools call the function
            each time they need examples.
        valid: a function that takes the operator's arguments and returns whether the operator
            accepts them. `check` generates further inputs from the examples and skips an input if
            `valid` returns False. Ordinary calls do not run `valid`. Without it, every input is
            valid.
        lib: the library that owns the registration: closing it removes the registration. By
            default, the registration lasts as long as the operator.

    Returns:
        `fn`, or a decorator if `fn` is omitted.
    """
    return EXAMPLES.register(op, fn, lib=lib, valid=valid)


def make_examples(op: OpLike) -> list[Example]:
    """Call an operator's registered example function and check the examples that it yields.

    Return a pair of positional arguments and keyword arguments for each example.
    """
    examples = EXAMPLES.lookup(op).make()
    overload = Operator(op, "examples").overload
    if not isinstance(examples, Iterable):
        raise RuleSignatureError(
            f"{overload.name()}: the function for examples must yield tuples of arguments, got "
            f"{short_repr(examples)}."
        )
    return [_example(overload, index, example) for index, example in enumerate(examples)]


def operator_of_examples(op: OpLike, caller: str) -> Operator:
    """Return an operator with its handle, i.e. the object that `custom_op` returned, if any.

    Examples may contain structures such as dataclasses, which only a handle accepts.
    """
    return Operator(Operator(op, caller).handle or op, caller)


def _example(op: OpOverload, index: int, example: Any) -> Example:
    signature = Operator(op, "examples").signature
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    elif isinstance(example, (tuple, list)):
        args, kwargs = tuple(example), {}
    else:
        raise RuleSignatureError(
            f"{op.name()}: example {index} must be a tuple of positional arguments, or a dict of "
            f"arguments by name; got {type(example).__name__}."
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise RuleSignatureError(
            f"{op.name()}: example {index} does not match the parameters of the operator, "
            f"{signature}: {error}."
        ) from None
    return args, kwargs
