"""The convention between an operator and the functions that its author registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torchop._schema.structure.structure import Structure

Function: TypeAlias = Callable[..., Any]
Formula: TypeAlias = tuple[Function, Function | None]


class Convention:
    """The author's functions take and return what the schema says.

    When a function is registered, a method here makes a function of it that follows the schema.
    For most operators that is the function itself. Where the author takes or returns structures,
    `StructuredConvention` converts between both.

    Attributes:
        structure: what is between the author's arguments and the schema's; None without one.
    """

    __slots__ = ()
    structure: Structure | None = None

    def kernel(self, function: Function, /) -> Function:
        """A kernel, for one or several device types."""
        return function

    def fake(self, function: Function, /) -> Function:
        """A fake kernel."""
        return function

    def vmap(self, function: Any, /) -> Any:
        """A vmap rule, or a word for one."""
        return function

    def torch_dispatch(self, function: Function, /) -> Function:
        """A rule for a mode or a Tensor subclass."""
        return function

    def formula(self, backward: Function, setup_context: Function | None, /) -> Formula:
        """A backward formula, and the function that prepares its context."""
        return backward, setup_context

    def jvp(self, jvp: Function, setup_context: Function | None, /) -> Formula:
        """A formula of forward mode, and the function that prepares its context."""
        return jvp, setup_context

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, none left out, as functions of the author take them."""
        return args, kwargs

    def result(self, result: Any, /) -> Any:
        """What there is for the results of a call, such as shapes, as the author returns them."""
        return result

    def deregistered(self, reason: str) -> None:
        """Makes the handle of an operator that is gone raise `OperatorGoneError`."""


FLAT = Convention()
