"""Check at registration time that a kernel or rule accepts the arguments it will receive."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from typing_extensions import TypeVar  # typing.TypeVar has no defaults before Python 3.13

from torchop._compat import compilers
from torchop._errors import RuleSignatureError, short_repr, short_text
from torchop._schema.schema import Schema
from torchop._schema.signatures import method_hint, spell_function

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def check_callable(what: str, function: object) -> None:
    if not callable(function):
        raise RuleSignatureError(
            f"{what} must be a function, got {short_repr(function)} of type "
            f"{type(function).__name__}."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise RuleSignatureError(
            f"{what}: {spell_function(function)} is an async function, so a call returns before "
            "the body has run. Write def instead of async def, and await outside of the "
            "operator, before or after the call."
        )


def check_no_generator(what: str, function: Callable[..., Any], schema: Schema | None) -> None:
    """Raise RuleSignatureError for a generator, unless the operator returns a `Tensor[]`."""
    if not inspect.isgeneratorfunction(function):
        return
    if schema is None or schema.returns != ("List[Tensor]",):
        raise RuleSignatureError(
            f"{what}: {spell_function(function)} is a generator, because it contains yield, so a "
            "call returns before the body has run. Write return instead of yield; return several "
            "results as a tuple."
        )


def accepts(
    function: Callable[..., Any], positional: Iterable[str], keywords: Iterable[str] = ()
) -> bool:
    """Return whether a function accepts these arguments, or True if it has no signature."""
    positional, keywords = tuple(positional), tuple(keywords)
    names = _plain_parameters(function)
    if names is not None and len(names) == len(positional) + len(keywords):
        return set(names[len(positional) :]) == set(keywords)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _plain_parameters(function: object) -> tuple[str, ...] | None:
    """Return a function's parameter names, or None if some are positional-only or keyword-only.

    The result is also None if the function takes `*args` or `**kwargs`. This is a fast path:
    calling `inspect.signature` instead would take up a sixth of the time of a registration.
    """
    # Functions with attributes need the slow path, because `__wrapped__` or `__signature__` may be
    # among the attributes, and either changes the signature.
    if not isinstance(function, types.FunctionType) or vars(function):
        return None
    code = function.__code__
    is_plain = not code.co_posonlyargcount and not code.co_kwonlyargcount
    if not is_plain or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    return code.co_varnames[: code.co_argcount]


_DEFAULT_HINT = " Give it these parameters."


def check_signature(
    what: str, function: Callable[..., Any], positional: Iterable[str], keywords: Iterable[str] = ()
) -> None:
    check_callable(what, function)
    positional, keywords = tuple(positional), tuple(keywords)
    if not accepts(function, positional, keywords):
        expected = ", ".join((*positional, *(("*", *keywords) if keywords else ())))
        raise RuleSignatureError(
            f"{what} is called with ({expected}), but {spell_function(function)} takes "
            f"{short_text(inspect.signature(function))}.{method_hint(function) or _DEFAULT_HINT}"
        )


def check_setup_context(
    name: object, setup_context: Callable[..., Any] | None, has_keywords: bool
) -> None:
    names = _setup_parameters(has_keywords)
    if setup_context is None or (callable(setup_context) and accepts(setup_context, (), names)):
        return
    more = (RESIDUALS,) if takes_residuals(setup_context) else ()
    check_signature(f"{name}: setup_context", setup_context, names, more)


# If `setup_context` declares a parameter of this name, it also receives the residuals, i.e. extra
# kernel outputs that only the backward pass uses.
RESIDUALS = "residuals"


def takes_residuals(setup_context: Any) -> bool:
    if setup_context is None:
        return False
    names = _plain_parameters(setup_context)
    if names is not None:
        return RESIDUALS in names
    try:
        # Unwrap to the author's own function. For an operator with structured arguments,
        # `setup_context` is wrapped in a function that accepts `**residuals`, whether or not the
        # author's function has a parameter `residuals`.
        parameter = inspect.signature(inspect.unwrap(setup_context)).parameters.get(RESIDUALS)
        return parameter is not None and parameter.kind is not parameter.VAR_KEYWORD
    except (TypeError, ValueError):  # not a function, or a builtin
        return False


def setup_caller(
    setup_context: Callable[..., Any] | None, has_keywords: bool
) -> Callable[..., Any] | None:
    """Wrap `setup_context` in a function that can be called the same way for every operator.

    The wrapper takes `(ctx, inputs, keyword_only_inputs, output)`, plus `residuals` (extra kernel
    outputs for the backward pass) if `setup_context` has that parameter. It drops the keyword-only
    inputs unless `has_keywords` is true. If `setup_context` uses these parameter names, the wrapper
    passes arguments by keyword, so authors may declare the parameters in any order.
    """
    if setup_context is None:
        return None
    if takes_residuals(setup_context):
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
    """Decorate a function to raise a clear TypeError if keyword-only arguments lack a keyword."""
    kinds = {name: p.kind for name, p in inspect.signature(function).parameters.items()}
    keywords = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    most = len(kinds) - len(keywords)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) > most:
            op = getattr(args[0], "_qualname", args[0])  # a handle, i.e. the result of custom_op
            name = getattr(args[most], "__name__", "")
            raise TypeError(
                f"{short_text(op)}: {function.__name__} takes {', '.join(keywords)} by keyword "
                f"only; write {keywords[0]}={short_text(name) if name.isidentifier() else '...'}."
            )
        return function(*args, **kwargs)

    return cast(Decorated, checked)


class Lambda:
    """Makes type checkers infer `Any` for the parameters of a lambda. No value has this type.

    If a lambda is passed for a parameter of type `Function`, Pyright in strict mode reports the
    lambda's parameters as partially unknown. With `Function | Lambda`, Pyright takes the lambda's
    parameter types from `Lambda`, and still infers its result type from `Function`.
    """

    def __call__(self, _0: Any, _1: Any, _2: Any, _3: Any, _4: Any, _5: Any, /) -> Any: ...


class Decorator(Protocol):
    def __call__(self, function: Decorated, /) -> Decorated: ...


# The type of a registered function. Every `register_...` function returns the registered function
# unchanged. Without a function, as in `register_fake(op)`, it returns a decorator instead, so the
# type variable defaults to `Decorator`. Without this default, every `register_...` function would
# need two overloads.
Function = TypeVar("Function", bound=Callable[..., Any], default=Decorator)
# Like `Function`, but for rules that aren't always functions: a vmap rule may also be a string.
Registered = TypeVar("Registered", default=Decorator)


def decorator_or_call(
    register: Callable[[Registered], object], value: Registered | Lambda | None
) -> Registered:
    """Register `value` and return it. If `value` is None, return a decorator."""

    @compilers.eager_only
    def decorate(decorated: Registered) -> Registered:
        register(decorated)
        return decorated

    return cast(Registered, decorate) if value is None else decorate(cast(Registered, value))
