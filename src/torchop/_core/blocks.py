from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Block(contextlib.ContextDecorator):
    """A context manager that can also decorate functions, but not generators or coroutines.

    Calling a generator or coroutine function returns before its body has run, so the context
    manager would exit too early.
    """

    def __call__(self, function: _Function) -> _Function:
        kinds = (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
        if any(kind(function) for kind in kinds):
            caller = type(self).__name__
            raise TypeError(
                f"{caller}() cannot decorate {getattr(function, '__qualname__', function)}, "
                "because it is a generator or coroutine function, whose body runs after the call. "
                f"Write `with torchop.{caller}(...):` inside it."
            )
        return super().__call__(function)
