"""Copy mutated views that PyTorch's functionalization describes incorrectly.

In a compiled program, functionalization replaces a mutated view with its base, and recreates the
view from a description: its sizes, strides and storage offset, or the start and end of a slice. In
some cases, the description is incorrect, so the operator would read and write the wrong elements
(see `tracing.is_misread_view`). In these cases, the operator writes into a copy of the view
instead, and the new value of the copy is then copied into the view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import registries, tracing
from torchop._compat.classes import FunctionalTensorMode, OpOverload
from torchop._core.call import Call, map_tensors, mutated_tensors, returned_result
from torchop._errors import TracingError
from torchop._rules import in_autocast
from torchop._rules.effect import functionalize_unless_dropped
from torchop._rules.functionalization.hidden_aliases import (
    copy_hidden_aliases,
    keep_mutated_copies,
    lasting_copy,
    sources_of,
)
from torchop._schema.forms import Form, form_of
from torchop._schema.schema import Argument, Schema

# Pairs of a mutated tensor and a tensor with its new value
TensorPairs = list[tuple[Tensor, Tensor]]


def install_low_level(qualname: str, *, is_mutable: bool) -> Callable[[], object]:
    """Install the rule for FunctionalTensorMode of a low-level operator.

    A low-level operator is one that `Library.define` or another package defined. If it mutates
    arguments, the rule copies misread views and hidden aliases. Operators of `custom_op` have a
    rule that does more (see `trace`).

    Return a function that removes the rule if this call has installed it.
    """
    rule = _functionalize_low_level if is_mutable else functionalize_unless_dropped
    return registries.register_default_torch_dispatch(qualname, FunctionalTensorMode, rule)


def _functionalize_low_level(
    mode: Any, op: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    schema = Schema(op._schema, form=form_of(op.tags))
    keep_mutated_copies(mode, schema, args, kwargs or {})
    call, copies = copy_misread_views(mode, op.name(), schema, args, kwargs or {})
    call = copy_hidden_aliases(mode, schema, *call)
    result = in_autocast.trace(mode, op, types, *call)
    if result is NotImplemented:
        return result
    with mode:
        for view, copy in copies:
            view.copy_(copy)
    if schema.form is not Form.PLAIN:
        # PyTorch's result has the value of the argument, but is another tensor.
        return returned_result(schema, args, kwargs or {})
    return result


def copy_misread_views(
    mode: Any, name: str, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, TensorPairs]:
    """Replace mutated views with copies if functionalization would describe the views incorrectly.

    Return the changed arguments, and a list of (view, copy) pairs.
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
    """Return the names of all mutated arguments, or an empty string if no memory is shared.

    `tensors` contains some of the mutated arguments. Memory is shared if a tensor in `tensors` may
    overlap another mutated argument.
    """
    mutated = mutated_tensors(schema, args, kwargs)
    if all(sum(tracing.may_overlap(one, other) for _, other in mutated) < 2 for one in tensors):
        return ""
    return ", ".join(dict.fromkeys(name for name, _ in mutated))
