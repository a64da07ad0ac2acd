"""`torchop.inverse` and `torchop.right_inverse`: functions that undo an operator.

An inverse `g` of `f` satisfies `g(f(x)) == x`, and a right inverse satisfies `f(g(y)) == y`.
"""

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
    """A registered inverse or right inverse, with everything that calls need.

    All fields are computed at registration time, because compilers trace `torchop.inverse` and
    might fail to trace this computation. `call` fills in the operator's default values. `required`
    contains the arguments without a default, except the first, and `results` is the number of
    results.
    """

    name: str
    call: Callable[..., Any]
    required: tuple[str, ...]
    results: int


class _InverseRule(Rule[Inverse]):
    """Stores inverse functions.

    An inverse takes the same arguments as the operator, except that the operator's output replaces
    the first argument.
    """

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
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: the inverse, called as `fn(output, *rest)`. `output` is the result of a call to the
            operator, and `rest` are all arguments of this call except the first. `torchop.inverse`
            calls `fn` directly, so compilers and transforms see the PyTorch operators that `fn`
            calls.
        lib: the library that owns the registration: closing it removes the registration. By
            default, the registration lasts as long as the operator.

    Returns:
        `fn`, or a decorator if `fn` is omitted.
    """
    return INVERSE.register(op, fn, lib=lib)


def register_right_inverse(
    op: OpLike, fn: Function | Lambda | None = None, /, *, lib: torch.library.Library | None = None
) -> Function:
    """Register a right inverse of the operator, for `torchop.right_inverse`: `op(fn(y))` is `y`.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: as in `register_inverse`.
        lib: the library that owns the registration: closing it removes the registration. By
            default, the registration lasts as long as the operator.

    Returns:
        `fn`, or a decorator if `fn` is omitted.
    """
    return RIGHT_INVERSE.register(op, fn, lib=lib)


def inverse(op: OpLike | functools.partial[Any] | Sequence[Any]) -> Callable[..., Any]:
    """Return the inverse of an operator: `inverse(op)(op(x, *rest), *rest)` is `x`.

    The returned function calls the function that was registered with `register_inverse`, and fills
    in the operator's default values for missing arguments. Compilers, vmap and autograd see the
    operators inside the registered function, so these operators must support them. Registering
    another inverse later does not affect functions that were already returned.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload. It may also be a `functools.partial` that binds arguments of
            an operator by keyword, or a list or tuple of operators and partials. A list stands for
            calling its operators in order, each with the result of the previous one, so the inverse
            undoes the last operator first.

    Returns:
        A function that takes the output of a call, followed by all arguments of this call except
        the first, and returns the first argument. For a sequence, it only takes the output.

    Raises:
        MissingRuleError: an operator has no inverse.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: an operator in a sequence has several results, or requires arguments
            that no `functools.partial` binds. This error is a `TypeError`.

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

    An operator that loses information has no inverse but may have a right inverse. For example,
    padding is a right inverse of cropping. An inverse is also a right inverse and can be
    registered as both.

    Args:
        op: as in `torchop.inverse`.

    Returns:
        A function with the same parameters as the function that `torchop.inverse` returns.

    Raises:
        MissingRuleError: an operator has no right inverse.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: an operator in a sequence has several results, or requires arguments
            that no `functools.partial` binds. This error is a `TypeError`.

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
    """Wrap an operator's inverse so that it receives the operator's defaults for omitted arguments.

    Dynamo must be able to trace the wrapper, so it only contains simple loops over lists.
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
