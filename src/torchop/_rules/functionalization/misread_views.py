"""Copy mutated views that PyTorch's functionalization describes incorrectly.

In a compiled program, functionalization replaces a mutated view with its base, and recreates the
view from metadata: its sizes, strides and storage offset, or the start and end of a slice. This
metadata is sometimes incorrect (see `tracing.is_misread_view`), and the operator would then read
and write the wrong elements. To avoid this, the operator mutates a copy of the view, and the result
is copied back into the view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import tracing
from torchop._core.call import Call, map_tensors, mutated_tensors
from torchop._errors import TracingError
from torchop._rules.functionalization.hidden_aliases import lasting_copy, sources_of
from torchop._schema.schema import Argument, Schema

# Pairs of a mutated tensor and a tensor with its new value
TensorPairs = list[tuple[Tensor, Tensor]]


def copy_misread_views(
    mode: Any, name: object, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, TensorPairs]:
    """Replace mutated views with copies if functionalization would record wrong offsets or dtypes.

    Return the changed arguments, and a (view, copy) pair for each replaced view.
    """
    copies: TensorPairs = []

    def change(argument: Argument, tensor: Tensor) -> Tensor:
        if not argument.is_mutated or not _is_misread(mode, tensor):
            return tensor
        copies.append((tensor, lasting_copy(mode, tensor)))
        return copies[-1][1]

    changed = map_tensors(schema, args, kwargs, change)
    if names := names_if_shared(schema, args, kwargs, [view for view, _ in copies]):
        raise TracingError(
            f"{name} was called with mutated arguments that may share memory ({names}). A "
            "compiler replaces one of them with a separate copy, because it is a view of another "
            "type, such as x.real, or a slice of an input that has a storage offset. Pass tensors "
            "that share no memory."
        )
    return changed, copies


def _is_misread(mode: Any, view: Tensor) -> bool:
    node = tracing.traced_node(mode, tracing.traced_base(view))
    has_offset = any(map(tracing.may_have_offset, sources_of(node)))
    return tracing.is_misread_view(view, node, has_offset)


def names_if_shared(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> str:
    """Return all names of mutated arguments, separated by commas, if some may share memory.

    Return an empty string if no tensor in `tensors`, a subset of the mutated arguments, may overlap
    another mutated argument.
    """
    mutated = mutated_tensors(schema, args, kwargs)
    if all(sum(tracing.may_overlap(one, other) for _, other in mutated) < 2 for one in tensors):
        return ""
    return ", ".join(dict.fromkeys(name for name, _ in mutated))
