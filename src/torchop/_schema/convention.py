"""The calling convention: which values the functions registered for an operator take and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torchop._schema.structure.structure import Structure

Function: TypeAlias = Callable[..., Any]
Formula: TypeAlias = tuple[Function, Function | None]


class Convention:
    """The default convention: registered functions take and return the values of the schema.

    Each method converts a registered function to a function that takes and returns the values of
    the schema. In this class, no conversion is needed, so the methods return the same function.
    `StructuredConvention` overrides the methods for operators whose functions take or return
    structures, such as dataclasses.

    Attributes:
        structure: converts between structures and the values of the schema. None if the operator
            has no structures.
    """

    __slots__ = ()
    structure: Structure | None = None

    def kernel(self, function: Function, /) -> Function:
        return function

    def fake(self, function: Function, /) -> Function:
        return function

    def vmap(self, function: Any, /) -> Any:
        """Convert a vmap rule. A string such as `"sequential"` is returned unchanged."""
        return function

    def torch_dispatch(self, function: Function, /) -> Function:
        return function

    def formula(self, backward: Function, setup_context: Function | None, /) -> Formula:
        return backward, setup_context

    def jvp(self, jvp: Function, setup_context: Function | None, /) -> Formula:
        return jvp, setup_context

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a call's arguments, including defaults, to arguments of registered functions."""
        return args, kwargs

    def result(self, result: Any, /) -> Any:
        """Convert one value per result of the schema, such as shapes, to the author's structure."""
        return result

    def deregistered(self, reason: str) -> None:
        """Make generated functions raise `OperatorGoneError` after the operator is deregistered."""


FLAT = Convention()
