"""Residuals declared in the annotation of a kernel's result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

from torchop._errors import SchemaError
from torchop._schema import signatures
from torchop._schema.naming import OpName


class Residuals:
    """What a kernel returns for the backward alone, in the annotation of its result.

    It stands in `Annotated`, which type checkers read as the type of the result. So do `custom_op`
    and the class form: the schema and `inspect.signature` of the handle have the result alone. It
    is another way to write `residuals=`.

    Args:
        types: the types of the residuals, by their names.

    Example:
        >>> import torch, torchop
        >>> from typing import Annotated
        >>> @torchop.custom_op("docs::expit", mutates_args=())
        ... def expit(
        ...     x: torch.Tensor,
        ... ) -> Annotated[torch.Tensor, torchop.Residuals(slope=torch.Tensor)]:
        ...     y = x.sigmoid()
        ...     return torchop.residuals(y, y * (1 - y))
        >>> import inspect
        >>> inspect.signature(expit)
        <Signature (x: torch.Tensor) -> torch.Tensor>
    """

    __slots__ = ("types",)

    def __init__(self, **types: Any) -> None:
        self.types = types

    def __repr__(self) -> str:
        return f"torchop.Residuals({', '.join(self.types)})"


def declared_types(
    name: OpName, function: Callable[..., Any], types: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the types of an operator's residuals; None if it has none."""
    declared = [each for each in _annotated(function)[1:] if isinstance(each, Residuals)]
    if len(declared) + (types is not None) > 1:
        raise SchemaError(
            f"{name}: its residuals are declared more than once: {', '.join(map(repr, declared))} "
            "in the annotation of the result, beside another of these or residuals=. Keep one."
        )
    return declared[0].types if declared else types


def show_output_alone(kernel: Any, function: Callable[..., Any]) -> None:
    """Remove the residuals from the signature of a kernel made from the author's function."""
    annotated = _annotated(function)
    alone = tuple(each for each in annotated if not isinstance(each, Residuals))
    if len(alone) < len(annotated):
        result = Annotated[alone] if len(alone) > 1 else alone[0]
        kernel.__signature__ = inspect.signature(function).replace(return_annotation=result)


def _annotated(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the type of a function's result, followed by its `Annotated` metadata."""
    try:
        written = signatures.written_result(function)
    except SchemaError:  # is raised again where a schema is inferred from it
        return (None,)
    return get_args(written) if get_origin(written) is Annotated else (written,)
