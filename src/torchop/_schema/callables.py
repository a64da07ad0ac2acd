"""Whether a kernel or rule can be called the way PyTorch will call it, asked at registration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from typing_extensions import TypeVar  # PyTorch needs it too; that of Python 3.12 has no defaults

from torchop._errors import RuleSignatureError, short_repr, short_text
from torchop._schema.schema import Schema
from torchop._schema.signatures import method_hint, spell_function

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def check_callable(what: str, function: object) -> None:
    """Reject values that cannot be called, and async functions, whose call computes nothing."""
    if not callable(function):
        raise RuleSignatureError(
            f"{what} must be a function, got {short_repr(function)} of type "
            f"{type(function).__name__}."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise RuleSignatureError(
            f"{what}: {spell_function(function)} is an async function, and a call of it returns "
            "before its body has run. Write def instead of async def, and await outside of the "
            "operator, before or after the call."
        )


def check_no_generator(what: str, function: Callable[..., Any], schema: Schema | None) -> None:
    """Refuses a kernel that yields its results, unless the schema has a list of them."""
    if not inspect.isgeneratorfunction(function):
        return
    if schema is None or schema.returns != ("List[Tensor]",):
        raise RuleSignatureError(
            f"{what}: {spell_function(function)} is a generator, because it contains yield, and a "
            "call of it returns before its body has run. Write return instead of yield; several "
            "results are a tuple."
        )


def accepts(
    function: Callable[..., Any], positional: Iterable[str], keywords: Iterable[str] = ()
) -> bool:
    """Whether `function` can be called with these arguments; True where nobody can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return True
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


_SAME = " Give it these parameters."


def check_signature(
    what: str, function: Callable[..., Any], positional: Iterable[str], keywords: Iterable[str] = ()
) -> None:
    """Refuses a function that cannot be called with these arguments."""
    check_callable(what, function)
    positional, keywords = tuple(positional), tuple(keywords)
    if not accepts(function, positional, keywords):
        expected = ", ".join((*positional, *(("*", *keywords) if keywords else ())))
        raise RuleSignatureError(
            f"{what} is called with ({expected}), but {spell_function(function)} takes "
            f"{short_text(inspect.signature(function))}.{method_hint(function) or _SAME}"
        )


def check_setup_context(
    name: object, setup_context: Callable[..., Any] | None, has_keywords: bool
) -> None:
    """Refuses a function that does not take the arguments of a `setup_context`."""
    names = _setup_parameters(has_keywords)
    if setup_context is None or (callable(setup_context) and accepts(setup_context, (), names)):
        return
    more = (RESIDUALS,) if asks_for_residuals(setup_context) else ()
    check_signature(f"{name}: setup_context", setup_context, names, more)


RESIDUALS = "residuals"  # the parameter by which a `setup_context` asks for them


def asks_for_residuals(setup_context: Any) -> bool:
    """Whether a `setup_context` has a parameter for what kernels return for the backward alone."""
    try:
        # Of the author's function: what stands for it, with objects, passes on whatever it asks.
        parameter = inspect.signature(inspect.unwrap(setup_context)).parameters.get(RESIDUALS)
        return parameter is not None and parameter.kind is not parameter.VAR_KEYWORD
    except (TypeError, ValueError):  # no function, or a builtin
        return False


def setup_caller(
    setup_context: Callable[..., Any] | None, has_keywords: bool
) -> Callable[..., Any] | None:
    """A function that calls `setup_context` by keyword as PyTorch does, or else by position.

    It takes what there is for keyword-only arguments too, and passes it on if there are such.
    """
    if setup_context is None:
        return None
    if asks_for_residuals(setup_context):
        if has_keywords:
            return setup_context
        return lambda ctx, inputs, keywords, output, residuals: setup_context(
            ctx, inputs, output, residuals=residuals
        )
    by_keyword = accepts(setup_context, (), _setup_parameters(has_keywords))
    if has_keywords:
        if by_keyword:
            return lambda ctx, inputs, keywords, output: setup_context(
                ctx=ctx, inputs=inputs, keyword_only_inputs=keywords, output=output
            )
        return setup_context
    if by_keyword:
        return lambda ctx, inputs, keywords, output: setup_context(
            ctx=ctx, inputs=inputs, output=output
        )
    return lambda ctx, inputs, keywords, output: setup_context(ctx, inputs, output)


def _setup_parameters(has_keywords: bool) -> tuple[str, ...]:
    keywords = ("keyword_only_inputs",) if has_keywords else ()
    return ("ctx", "inputs", *keywords, "output")


def keyword_only(function: Decorated) -> Decorated:
    """Has a function say which of its arguments are keywords, when they are passed by position."""
    kinds = {name: p.kind for name, p in inspect.signature(function).parameters.items()}
    keywords = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    most = len(kinds) - len(keywords)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) > most:
            op = getattr(args[0], "_qualname", args[0])  # of a handle
            name = getattr(args[most], "__name__", "")
            raise TypeError(
                f"{short_text(op)}: {function.__name__} takes {', '.join(keywords)} by keyword "
                f"only; write {keywords[0]}={short_text(name) if name.isidentifier() else '...'}."
            )
        return function(*args, **kwargs)

    return cast(Decorated, checked)


class Lambda:
    """The type that a lambda is read with: its parameters are Any. There are no such objects.

    A type variable alone gives a lambda's parameters no type, which Pyright reports in its strict
    mode. So the argument is `Function | Lambda`: the one keeps the type, the other gives it.
    """

    def __call__(self, _0: Any, _1: Any, _2: Any, _3: Any, _4: Any, _5: Any, /) -> Any: ...


class Decorator(Protocol):
    """Registers the function that it decorates, and returns it."""

    def __call__(self, function: Decorated, /) -> Decorated: ...


# The function that a user registers. Where they pass none, type checkers take the default of the
# type variable: the result of `register_fake(op)` is a decorator. So one signature, `(..., func:
# Function | Lambda | None = None) -> Function`, says what otherwise takes two overloads.
Function = TypeVar("Function", bound=Callable[..., Any], default=Decorator)
# The same where a user may register what is no function.
Registered = TypeVar("Registered", default=Decorator)


def decorator_or_call(
    register: Callable[[Registered], object], value: Registered | Lambda | None
) -> Registered:
    """Registers `value` and returns it; without one, returns the decorator that does."""

    def decorate(decorated: Registered) -> Registered:
        register(decorated)
        return decorated

    return cast(Registered, decorate) if value is None else decorate(cast(Registered, value))
