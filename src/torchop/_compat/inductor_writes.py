"""Lowerings that make Inductor compile operators that write into their arguments correctly.

Workarounds for two bugs of Inductor 2.13, which produce wrong values without an error. Each can be
removed when its bug is fixed in the oldest supported release:

- `FallbackKernel.__init__` (torch/_inductor/ir.py) registers the operator's call, and so fixes the
  place in the generated code, before `MutationOutput` realizes values computed from the written
  memory. In `y = x + 1; op(x); out.copy_(y)`, where `x` and `out` are graph inputs, the sum reads
  the new `x`.
- pytorch/pytorch#198068: `aten.sym_storage_offset` has no lowering, unlike `sym_size` and
  `sym_stride`. So `FallbackKernel.process_kernel` evaluates it on a fake tensor with offset 0.
  Inductor inserts this call where it clones a written argument (`clone_preserve_strides`) and
  dynamic shapes make the storage offset symbolic.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from torchop._compat import import_hooks, operators, torch_ops

_LOWERING = "torch._inductor.lowering"
# Operators defined before Inductor was imported.
_waiting: set[str] = set()


def register_lowerings(qualname: str) -> None:
    """Register the lowerings of an operator with mutable arguments.

    If Inductor is not imported yet, they are registered on import.
    """
    if _inductor() is not None:
        _register(qualname)
        return
    if not _waiting:
        import_hooks.when_imported(_LOWERING, _register_waiting)
    _waiting.add(qualname)


def _inductor() -> Any:
    """Return Inductor's lowering module if it is imported and has `user_lowerings`."""
    module = sys.modules.get(_LOWERING)
    return module if hasattr(module, "user_lowerings") else None


def _register_waiting() -> None:
    while _waiting:
        qualname = _waiting.pop()
        # The operator may be deregistered by now, while another library still holds a kernel for
        # it.
        if operators.has_schema(qualname) and _inductor() is not None:
            _register(qualname)


def _register(qualname: str) -> None:
    module = _inductor()
    module.lowerings.setdefault(torch.ops.aten.sym_storage_offset.default, _lower_storage_offset)
    overload = torch_ops.lookup_overload(*operators.parts(qualname))
    # A user's lowering takes precedence.
    module.user_lowerings.setdefault(overload, functools.partial(_realize_readers, overload))


def is_ours(lowering: object) -> bool:
    """Return whether a lowering is `_realize_readers`, which leaves the call to Inductor."""
    return isinstance(lowering, functools.partial) and lowering.func is _realize_readers


def _realize_readers(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Realize the readers of written arguments; return None so that Inductor lowers the call."""
    import torch._inductor.ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    for value in _written(op, args, kwargs):
        for box in tree_leaves(value):
            if isinstance(box, torch._inductor.ir.IRNode):
                box.realize()
                V.graph.mark_buffer_mutated(box.get_name())


def _written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    arguments = op._schema.arguments
    passed = {**{each.name: arg for each, arg in zip(arguments, args, strict=False)}, **kwargs}
    return [passed.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]


def _lower_storage_offset(tensor: Any) -> Any:
    """Return the offset of the traced tensor, like Inductor's lowering of `sym_stride`."""
    from torch._inductor.virtualized import V  # imports Inductor

    offset = V.graph.current_node.meta["val"]
    return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)
