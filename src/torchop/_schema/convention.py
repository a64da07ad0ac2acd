"""Calling conventions: how kernels and rules take arguments and return results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torchop._schema.structure.structure import Structure

Function: TypeAlias = Callable[..., Any]
Formula: TypeAlias = tuple[Function, Function | None]


class Convention:
    """The default convention, in which registered functions take and return plain schema values.

    Each method wraps a function that a user registers, such as a kernel, so that it takes and
    returns plain schema values. In this base class, the methods return the function unchanged.
    `StructuredConvention` overrides them for operators with structured arguments or results, such
    as dataclasses.
    """

    __slots__ = ()
    structure: Structure | None = None
    mutates_objects = False  # whether `mutates_args` names an object

    def kernel(self, function: Function, /) -> Function:
        return function

    def fake(self, function: Function, /) -> Function:
        return function

    def vmap(self, function: Any, /) -> Any:
        """Convert a vmap rule. A string such as `"sequential"` is returned unchanged."""
        return function

    def torch_dispatch(self, function: Function, /) -> Function:
        return function

    def of_tensors(self, values: Mapping[str, Any], /) -> dict[str, Any]:
        """Convert a dict from parameters to a dict from the schema's tensor arguments."""
        return dict(values)

    def formula(self, backward: Function, setup_context: Function | None, /) -> Formula:
        return backward, setup_context

    def jvp(self, jvp: Function, setup_context: Function | None, /) -> Formula:
        return jvp, setup_context

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a call's arguments and defaults to arguments of the author's functions."""
        return args, kwargs

    def result(self, result: Any, /) -> Any:
        """Pack one value per result into the same structure that the kernel returns.

        `result` holds one value, such as a shape, for each result in the schema. For example, if
        kernels return a NamedTuple of tensors, this packs their shapes into the same NamedTuple.
        """
        return result

    def deregistered(self, reason: str) -> None:
        """Make generated functions raise OperatorGoneError, since the operator is deregistered."""


FLAT = Convention()
