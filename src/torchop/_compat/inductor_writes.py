"""Make Inductor correctly compile operators that write to their arguments.

The lowerings in this module are workarounds for two bugs in Inductor, each of which silently makes
compiled programs compute wrong values. A workaround can be removed once no supported release has
the bug:

- In `y = x + 1; op(x); out.copy_(y)`, where `x` and `out` are graph inputs and `op` writes to `x`,
  the compiled program computes `x + 1` after `op` has changed `x`. Inductor computes a value only
  when the value is realized (stored in a buffer), and `FallbackKernel.__init__`
  (torch/_inductor/ir.py) adds the call of `op` to the generated code before `MutationOutput`
  realizes the values that depend on `x`. The workaround realizes these values before the call.
- pytorch/pytorch#198068: if dynamic shapes make the storage offset of a mutated argument symbolic,
  Inductor uses an offset of 0. When it clones the argument (`clone_preserve_strides`), Inductor
  inserts a call to `aten.sym_storage_offset`. Unlike `sym_size` and `sym_stride`, this operator
  has no lowering, so `FallbackKernel.process_kernel` evaluates it on a fake tensor with an offset
  of 0. The workaround adds a lowering.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, cast

import torch
from torch._library.utils import get_layout_constraint_tag
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from torchop._compat import import_hooks, operators, torch_ops

_LOWERING = "torch._inductor.lowering"
_POST_GRAD = "torch._inductor.fx_passes.post_grad"
# The operators whose lowerings will be registered once Inductor is imported.
_waiting: set[str] = set()


def register_lowerings(qualname: str) -> None:
    """Fix the lowering of an operator that mutates arguments, once Inductor is imported."""
    _waiting.add(qualname)
    if len(_waiting) == 1:
        import_hooks.when_imported(_LOWERING, _register_waiting)


def _register_waiting() -> None:
    while _waiting:
        qualname = _waiting.pop()
        # Skip an operator that has been deregistered in the meantime. Look for its schema rather
        # than its name, because the dispatcher keeps the name if another library has registered a
        # kernel.
        if operators.has_schema(qualname):
            _register(torch_ops.lookup_overload(*operators.parts(qualname)))


def _register(overload: OpOverload) -> None:
    module: Any = sys.modules[_LOWERING]
    if not as_strided_ignores_offsets():
        # If `as_strided` ignores offsets, this hides the wrong offset of 0 from
        # `sym_storage_offset`. Fixing only one of the two bugs would lead to wrong results, so in
        # that case, add no lowering.
        module.lowerings.setdefault(
            torch.ops.aten.sym_storage_offset.default, _lower_storage_offset
        )
    realize = functools.partial(_realize_readers, overload)
    # In both cases below, a lowering that the user has registered takes precedence.
    if hasattr(module, "user_lowerings"):
        module.user_lowerings.setdefault(overload, realize)
    elif overload not in module.lowerings:
        # 2.11 has no `user_lowerings`. So create the same fallback lowering as Inductor would (in
        # `GraphLowering.call_function`, torch/_inductor/graph.py), and wrap it in a lowering that
        # calls `_realize_readers` first.
        tag = get_layout_constraint_tag(overload)
        module.make_fallback(overload, layout_constraint=module.tag_to_layout_constraint(tag))
        fall_back = module.lowerings[overload]
        module.lowerings[overload] = lambda *args, **kwargs: (
            realize(*args, **kwargs) or fall_back(*args, **kwargs)
        )


def as_strided_ignores_offsets() -> bool:
    """Return whether Inductor's `as_strided` ignores the storage offset of graph inputs.

    Fixed in 2.13 by pytorch/pytorch#184232.
    """
    from torch._inductor.lowering import as_strided  # imports Inductor

    return "storage_offset_relative_to_input_storage" not in signature(as_strided).parameters


def is_ours(lowering: object) -> bool:
    return isinstance(lowering, functools.partial) and lowering.func is _realize_readers


def _realize_readers(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Realize all values computed from mutated arguments before the operator writes to them.

    Returns None, which makes Inductor lower the call as usual.
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
    """Return the storage offset from the trace, as the lowering of `sym_stride` does."""
    from torch._inductor.virtualized import V  # imports Inductor

    offset = V.graph.current_node.meta["val"]
    return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)


def before_copies_are_removed(change: Callable[[torch.fx.Graph], None]) -> None:
    """Register `change`, which modifies each graph before Inductor removes copies from it."""

    def connect() -> None:
        module: Any = sys.modules[_POST_GRAD]
        remove = module.remove_noop_ops

        @functools.wraps(remove)
        def remove_noop_ops(graph: torch.fx.Graph) -> None:
            change(graph)
            remove(graph)

        module.remove_noop_ops = remove_noop_ops

    import_hooks.when_imported(_POST_GRAD, connect)


def is_write(node: torch.fx.Node) -> bool:
    """Return whether a node stands for a call that mutates arguments, in functionalized form.

    Such a node returns the new values of the mutated arguments. Inductor later decides which of the
    arguments the call may mutate in place.
    """
    return node.target is torch.ops.higher_order.auto_functionalized_v2


def has_writes(graph: torch.fx.Graph) -> bool:
    return any(map(is_write, graph.nodes))


def bases_of_result(node: torch.fx.Node) -> list[Any]:
    """Return the tensors whose new value `node` may be. The list is empty for other nodes."""
    if node.target is not operator.getitem:
        return []
    call, index = node.args
    if not isinstance(call, torch.fx.Node) or not is_write(call):
        return []
    called, bases = call.args[0], cast(list[Any], call.kwargs["_all_bases"])
    if not isinstance(called, OpOverload):  # a higher-order operator, such as `while_loop`
        return bases
    # The node returns a tuple of the operator's results, or one None if there are none, followed by
    # the new values.
    place = cast(int, index) - max(1, len(called._schema.returns))
    return [bases[place]] if place >= 0 else []
