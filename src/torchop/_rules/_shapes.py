"""The two shapes every registration function has: a decorator, or a call with the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def decorator_or_call(
    register: Callable[[Function], object], function: Function | None
) -> Function | Callable[[Function], Function]:
    """Registers `function` and returns it; without one, returns the decorator that does."""

    def decorate(decorated: Function) -> Function:
        register(decorated)
        return decorated

    return decorate if function is None else decorate(function)
