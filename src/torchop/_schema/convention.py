"""The calling convention of the functions that an operator's author registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torchop._schema.structure.structure import Structure

Function: TypeAlias = Callable[..., Any]
Formula: TypeAlias = tuple[Function, Function | None]


class Convention:
    """The default convention: the author's functions take and return the schema's values.

    Each method converts a registered function to one that follows the schema, and is the identity
    here. `StructuredConvention` overrides them for authors who take or return structures.

    Attributes:
        structure: converts between the author's arguments and the schema's; None if both agree.
    """

    __slots__ = ()
    structure: Structure | None = None

    def kernel(self, function: Function, /) -> Function:
        return function

    def fake(self, function: Function, /) -> Function:
        return function

    def vmap(self, function: Any, /) -> Any:
        """Convert a vmap rule. Strings such as `"sequential"` stay unchanged."""
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
        """Convert the schema's arguments to the author's. No argument may be missing."""
        return args, kwargs

    def result(self, result: Any, /) -> Any:
        """Convert values of the schema's results, such as shapes, to the author's structure."""
        return result

    def deregistered(self, reason: str) -> None:
        """Make the handle of a deregistered operator raise `OperatorGoneError`."""


FLAT = Convention()
