"""The method of a handle that registers a rule, made from what the rule says of its value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from torchop._core.user_rule import Rule
from torchop._schema.callables import Function, decorator_or_call

P = ParamSpec("P")

if TYPE_CHECKING:  # for checkers alone: a Protocol takes a while to make
    from typing import Protocol

    class BoundMethod(Protocol[P]):
        """A method of a handle: called with a function, or used as a decorator."""

        def __call__(
            self, fn: Function | None = None, /, *args: P.args, **kwargs: P.kwargs
        ) -> Function: ...

    class Method(Protocol[P]):
        def __get__(self, handle: object, owner: type | None = None, /) -> BoundMethod[P]: ...


def handle_method(
    rule: Rule[Any],
) -> Callable[[Callable[Concatenate[Any, P], object]], Method[P]]:
    """Makes the method that registers a rule whose values are functions.

    Decorates a function `(fn, /, *, options)` that has the name and the docstring of the method,
    and that returns what `rule.validate` gets: `fn`, or `fn` with the options. The method returns
    `fn`, and without `fn` a decorator.
    """

    def decorate(value: Callable[Concatenate[Any, P], object]) -> Any:
        def method(self: Any, fn: Any = None, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            # Before it decorates, this refuses an operator that ended.
            register: Callable[[Any], object] = rule.register(self)
            return decorator_or_call(
                lambda function: register(value(function, *args, **kwargs)), fn
            )

        first, *options = inspect.signature(value).parameters.values()
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.Signature([this, first.replace(default=None), *options])
        functools.update_wrapper(method, value)
        method.__signature__ = signature  # type: ignore[attr-defined]
        return method

    return decorate
