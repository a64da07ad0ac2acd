"""How the functions of an operator's author are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Convention:
    """With the arguments of the schema, in its order; a structure calls them with objects.

    What a user registers goes through here when it is registered, and comes out as a function of
    the schema's arguments. `op` is the definition, for its name and its schema.
    """

    __slots__ = ()
    structure: Any  # between the author's arguments and the schema's; None without one

    def kernel(self, op: Any, function: Callable[..., Any], /) -> Callable[..., Any]:
        return function

    def fake(self, op: Any, function: Callable[..., Any], /) -> Callable[..., Any]:
        return function

    def vmap(self, op: Any, function: Any, /) -> Any:
        return function

    def torch_dispatch(self, op: Any, function: Callable[..., Any], /) -> Callable[..., Any]:
        return function

    def formula(
        self, op: Any, backward: Callable[..., Any], setup_context: Callable[..., Any] | None, /
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        return backward, setup_context

    def jvp(
        self, op: Any, jvp: Callable[..., Any], setup_context: Callable[..., Any] | None, /
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        return jvp, setup_context

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, none left out, as functions of the author take them."""
        return args, kwargs

    def ended(self, reason: str) -> None:
        """Lets what calls the operator refuse."""


class _Flat(Convention):
    __slots__ = ()
    structure = None


FLAT = _Flat()
