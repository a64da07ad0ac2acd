"""Mutated views whose dtype is not that of their base.

PyTorch's functionalization describes a mutated view by sizes and strides, without the dtype: an
operator that writes into `torch.view_as_complex(x)` would get real numbers. It gets a copy of the
view instead, which is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchop._compat import tracing
from torchop._core.call import map_tensors, mutated_tensors
from torchop._core.definition import Definition
from torchop._errors import FunctionalizationError
from torchop._schema.schema import Argument

# Each view, and the copy that the operator writes into.
Copies = list[tuple[Tensor, Tensor]]


def copy_views(
    mode: Any, definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Copies]:
    """The arguments of a traced call, with copies in place of mutated views of another dtype."""
    copies: Copies = []

    def change(argument: Argument, tensor: Tensor) -> Tensor:
        if not argument.is_mutated or not tracing.is_view_of_other_type(tensor):
            return tensor
        with mode:
            copies.append((tensor, tensor.clone()))
        return copies[-1][1]

    changed = map_tensors(definition.schema, args, kwargs, change)
    if copies:
        _refuse_shared_memory(definition, args, kwargs, [view for view, _ in copies])
    return *changed, copies


def write_back(mode: Any, copies: Copies) -> None:
    """Copies the new values into the views."""
    with mode:
        for view, values in copies:
            view.copy_(values)


def _refuse_shared_memory(
    definition: Definition, args: Any, kwargs: Any, views: Sequence[Tensor]
) -> None:
    mutated = mutated_tensors(definition.schema, args, kwargs)
    memory = [tracing.traced_memory(tensor) for _, tensor in mutated]
    for view in views:
        if memory.count(tracing.traced_memory(view)) > 1:
            raise FunctionalizationError(
                f"{definition} was called with a view of another type (such as x.real, or "
                "torch.view_as_complex(x)) among its mutated arguments "
                f"({', '.join(dict.fromkeys(name for name, _ in mutated))}), and another of them "
                "has the same memory. A compiler replaces such a view with a copy, which would "
                "not share memory. Pass tensors that share no memory."
            )
