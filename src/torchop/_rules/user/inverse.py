"""Inverses and right inverses of operators, and of sequences of operators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch.library

from torchop._core.user_rule import Rule
from torchop._errors import MissingRuleError, RuleSignatureError, SchemaError
from torchop._schema.callables import Function, Lambda
from torchop.extend import Operator, OpLike, OpOverload, check_arguments, short_repr

__all__ = ["inverse", "right_inverse"]  # public names


class Inverse(NamedTuple):
    """A registered inverse.

    All attributes are computed at registration, because compilers trace `torchop.inverse`.

    Attributes:
        name: the name of the operator.
        call: the function that the user registered, with the operator's defaults filled in.
        required: the names of the operator's arguments without a default, except the first one.
        results: the number of results of the operator.
    """

    name: str
    call: Callable[..., Any]
    required: tuple[str, ...]
    results: int


class _InverseRule(Rule[Inverse]):
    """The rule that stores an inverse, which takes the output instead of the first argument."""

    def validate(self, op: OpOverload, value: Any) -> Inverse:
        if not op._schema.returns or not op._schema.arguments or op._schema.arguments[0].kwarg_only:
            raise SchemaError(
                f"{op._name}: {_article(self)} takes the output instead of the first argument, so "
                f"the operator must have both. Got {op._schema}."
            )
        check_arguments(
            f"{op._name}: {_article(self)}", op, value, leading=("output",), without_first=True
        )
        parameters = list(Operator(op, self.name).signature.parameters.values())[1:]
        return Inverse(
            op._name,
            _with_defaults(value, parameters, f"{_article(self)} of {op._name}"),
            tuple(p.name for p in parameters if p.default is p.empty),
            len(op._schema.returns),
        )

    def missing(self, op: OpOverload) -> Inverse:
        other = RIGHT_INVERSE if self is INVERSE else INVERSE
        hint = (
            f" It has {_article(other)}, called by torchop.{other.name}(op)."
            if other._entry(op) is not None  # Dynamo cannot trace `has`
            else ""
        )
        raise MissingRuleError(
            f"{op._name} has no {self.name.replace('_', ' ')}.{hint} Register one: "
            f"op.register_{self.name}(fn), or for an operator without a handle "
            f"torchop.get_rule('{self.name}').register('{op._name}', fn), with fn(output, *rest) "
            "where rest are the other arguments of the call."
        )


INVERSE = _InverseRule("inverse")
RIGHT_INVERSE = _InverseRule("right_inverse")


def register_inverse(
    op: OpLike, fn: Function | Lambda | None = None, /, *, lib: torch.library.Library | None = None
) -> Function:
    """Register the inverse of the operator, for `torchop.inverse`.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: `fn(output, *rest)`, where `rest` are all arguments, except the first one, of the call
            that returned `output`. It must consist of PyTorch operators, because `torchop.inverse`
            calls it directly.
        lib: the library that owns the registration. By default, it lasts as long as the operator.

    Returns:
        `fn`, or a decorator if `fn` is omitted.
    """
    return INVERSE.register(op, fn, lib=lib)


def register_right_inverse(
    op: OpLike, fn: Function | Lambda | None = None, /, *, lib: torch.library.Library | None = None
) -> Function:
    """Register a right inverse for `torchop.right_inverse`: `op(fn(y))` is `y`.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: as in `register_inverse`.
        lib: the library that owns the registration. By default, it lasts as long as the operator.

    Returns:
        `fn`, or a decorator if `fn` is omitted.
    """
    return RIGHT_INVERSE.register(op, fn, lib=lib)


def inverse(op: OpLike | functools.partial[Any] | Sequence[Any]) -> Callable[..., Any]:
    """Return the inverse of an operator: `inverse(op)(op(x, *rest), *rest)` is `x`.

    The inverse calls the function that was registered with `register_inverse`, with the operator's
    defaults filled in. It supports graphs, vmap and gradients if the operators that the function
    calls support them. Later registrations do not change it.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload. Or a `functools.partial` of an operator, with arguments by
            keyword. Or a sequence of these, each of which is called with the result of the previous
            one. The inverse of a sequence starts with the last operator.

    Returns:
        A function `(output, *rest, **keywords)`, where `rest` and `keywords` are the other
        arguments of the call that returned `output`. For a sequence, it only takes the output.

    Raises:
        MissingRuleError: an operator has no inverse.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: a `TypeError`: an operator of a sequence needs more arguments, or
            returns more than one result.

    Example:
        >>> import functools, torch, torchop
        >>> @torchop.custom_op("docs::shifted", mutates_args=())
        ... def shifted(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        ...     return x + by
        >>> @shifted.register_inverse
        ... def _(output, by):
        ...     return output - by
        >>> torchop.inverse(shifted)(shifted(torch.zeros(1), by=2.0), by=2.0)
        tensor([0.])
        >>> steps = [shifted, functools.partial(shifted, by=5.0)]
        >>> torchop.inverse(steps)(torch.tensor([6.0]))
        tensor([0.])

    Based on `inv` of `torch.distributions.transforms`.
    """
    return _undo(INVERSE, op)


def right_inverse(op: OpLike | functools.partial[Any] | Sequence[Any]) -> Callable[..., Any]:
    """Return a right inverse of an operator: `op(right_inverse(op)(y))` is `y`.

    An operator that loses information has no inverse, but may have a right inverse. For example,
    padding is a right inverse of cropping. An inverse is also a right inverse, and can be
    registered as both.

    Args:
        op: as in `torchop.inverse`.

    Returns:
        A function, as from `torchop.inverse`.

    Raises:
        MissingRuleError: an operator has no right inverse.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: a `TypeError`: an operator of a sequence needs more arguments, or
            returns more than one result.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::first", mutates_args=())
        ... def first(x: torch.Tensor) -> torch.Tensor:
        ...     return x[:1].clone()
        >>> @first.register_right_inverse
        ... def _(output):
        ...     return torch.cat([output, torch.zeros(2)])
        >>> first(torchop.right_inverse(first)(torch.ones(1)))
        tensor([1.])

    Based on `right_inverse` of `torch.nn.utils.parametrize`.
    """
    return _undo(RIGHT_INVERSE, op)


def _undo(rule: _InverseRule, op: Any) -> Callable[..., Any]:
    if not isinstance(op, (list, tuple)):
        return _undo_call(rule, op)[1]
    steps = []
    for each in op:
        inverse, step = _undo_call(rule, each)
        _check_composable(rule, inverse, each)
        steps.append(step)
    steps.reverse()

    def undo(output: Any) -> Any:
        for step in steps:
            output = step(output)
        return output

    return undo


def _undo_call(rule: _InverseRule, op: Any) -> tuple[Inverse, Callable[..., Any]]:
    """Return an operator's registered inverse, and a function that inverts a call with it."""
    if not isinstance(op, functools.partial):
        inverse = rule.lookup(op)
        return inverse, inverse.call
    inverse = rule.lookup(cast(OpLike, op.func))
    if op.args:
        raise RuleSignatureError(
            f"{inverse.name}: to invert a functools.partial, bind all arguments by keyword, "
            f"because the first one is the result of the inverse; got {short_repr(op)}."
        )
    return inverse, functools.partial(inverse.call, **op.keywords)


def _with_defaults(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], what: str
) -> Callable[..., Any]:
    """Wrap an inverse so that it receives all arguments by position, with defaults filled in.

    Dynamo traces the wrapper, so the wrapper uses only simple loops over lists.
    """
    positional = [
        (p.name, p.default is not p.empty, p.default)
        for p in parameters
        if p.kind is not p.KEYWORD_ONLY
    ]
    keyword_only = {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }

    def undo(output: Any, /, *rest: Any, **keywords: Any) -> Any:
        arguments = list(rest)
        for parameter, has_default, default in positional[len(rest) :]:
            if parameter in keywords:
                arguments.append(keywords.pop(parameter))
            elif has_default:
                arguments.append(default)
            else:
                raise TypeError(f"{what} is missing the argument {parameter!r}.")
        return function(output, *arguments, **{**keyword_only, **keywords})

    return undo


def _check_composable(rule: _InverseRule, inverse: Inverse, step: Any) -> None:
    """Raise if an operator in a sequence has several results, or needs more than one argument."""
    if inverse.results != 1:
        raise RuleSignatureError(
            f"{inverse.name} has {inverse.results} results, but each operator of a sequence is "
            f"called with the one result of the operator before it. Call torchop.{rule.name} on it "
            "alone."
        )
    bound = step.keywords if isinstance(step, functools.partial) else {}
    for parameter in inverse.required:
        if parameter not in bound:
            raise RuleSignatureError(
                f"{inverse.name}: the argument {parameter!r} has no value in a sequence, because "
                "each operator is called with the previous output alone. Bind it: "
                f"functools.partial(op, {parameter}=...)."
            )


def _article(rule: _InverseRule) -> str:
    return "an inverse" if rule is INVERSE else "a right inverse"
