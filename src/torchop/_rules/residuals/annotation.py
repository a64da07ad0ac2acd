"""Declare residuals in the return annotation of a kernel.

Residuals are extra kernel outputs that only the backward pass uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

from torchop._errors import mistake
from torchop._schema import signatures


class Residuals:
    """Declare the residuals of an operator in the return annotation of the kernel.

    Residuals are extra kernel outputs that only the backward pass uses, so they do not appear in
    the operator's schema or signature. Use this class in `typing.Annotated`, as an alternative to
    the `residuals` argument of `custom_op`.

    Args:
        types: the type of each residual, as keyword arguments.

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


def declared_types(returned: Any, types: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the types of an operator's residuals, or None if it declares none.

    The residuals (extra kernel outputs for the backward pass) are declared either in the return
    annotation `returned` or by `types`.
    """
    declared = [each for each in _annotated(returned)[1:] if isinstance(each, Residuals)]
    if len(declared) + (types is not None) > 1:
        raise mistake(
            f"residuals are declared more than once: {', '.join(map(repr, declared))} in the "
            "return annotation, in addition to another declaration. Keep one."
        )
    return declared[0].types if declared else types


def hide_residuals(kernel: Any, function: Callable[..., Any]) -> None:
    annotated = _annotated(signatures.written_annotations(function).get("return"))
    alone = tuple(each for each in annotated if not isinstance(each, Residuals))
    if len(alone) < len(annotated):
        result = Annotated[alone] if len(alone) > 1 else alone[0]
        kernel.__signature__ = inspect.signature(function).replace(return_annotation=result)


def _annotated(returned: Any) -> tuple[Any, ...]:
    """Split a return annotation into the type and the `Annotated` metadata."""
    return get_args(returned) if get_origin(returned) is Annotated else (returned,)
