"""Lowerings with which Inductor correctly compiles operators that write into their arguments.

Workarounds for two bugs of Inductor, which otherwise computes wrong values without an error. Remove
each workaround when no supported release has the bug:

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
from inspect import signature
from typing import Any

import torch
from torch._library.utils import get_layout_constraint_tag
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from torchop._compat import import_hooks, operators, torch_ops

_LOWERING = "torch._inductor.lowering"
# Operators that get lowerings once Inductor is imported.
_waiting: set[str] = set()


def register_lowerings(qualname: str) -> None:
    """Register the lowerings of an operator with mutable arguments.

    If Inductor is not imported yet, they are registered on import.
    """
    _waiting.add(qualname)
    if len(_waiting) == 1:
        import_hooks.when_imported(_LOWERING, _register_waiting)


def _register_waiting() -> None:
    while _waiting:
        qualname = _waiting.pop()
        # The operator may be deregistered by now. The dispatcher still has the name if another
        # library registered a kernel for it.
        if operators.has_schema(qualname):
            _register(torch_ops.lookup_overload(*operators.parts(qualname)))


def _register(overload: OpOverload) -> None:
    module: Any = sys.modules[_LOWERING]
    if "storage_offset_relative_to_input_storage" in signature(module.as_strided).parameters:
        # Before pytorch/pytorch#184232 in 2.13, `as_strided` ignores the storage offset of graph
        # inputs. With symbolic offsets, the two bugs cancel each other out.
        module.lowerings.setdefault(
            torch.ops.aten.sym_storage_offset.default, _lower_storage_offset
        )
    realize = functools.partial(_realize_readers, overload)
    # In both cases, a user's lowering takes precedence.
    if hasattr(module, "user_lowerings"):
        module.user_lowerings.setdefault(overload, realize)
    elif overload not in module.lowerings:
        # 2.11 has no `user_lowerings`. Create the fallback that `GraphLowering.call_function`
        # (torch/_inductor/graph.py) would create, and realize the readers before it runs.
        tag = get_layout_constraint_tag(overload)
        module.make_fallback(overload, layout_constraint=module.tag_to_layout_constraint(tag))
        fall_back = module.lowerings[overload]
        module.lowerings[overload] = lambda *args, **kwargs: (
            realize(*args, **kwargs) or fall_back(*args, **kwargs)
        )


def is_ours(lowering: object) -> bool:
    """Return whether a lowering is `_realize_readers`, after which Inductor lowers the call."""
    return isinstance(lowering, functools.partial) and lowering.func is _realize_readers


def _realize_readers(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Realize the computations that read the written arguments, before the operator writes.

    Returns None, so that Inductor lowers the call.
    """
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
    """Return the storage offset of the traced tensor, as `sym_stride` is lowered."""
    from torch._inductor.virtualized import V  # imports Inductor

    offset = V.graph.current_node.meta["val"]
    return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)
