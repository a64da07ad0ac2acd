"""Protect copies that an operator writes into, because compilers might remove them.

For example, in `y = x.clone(); reverse(y, x)`, `y` must remain a copy of `x` if the operator
`reverse` writes into `y` and reads `x`.

Workaround for pytorch/pytorch#198031: Inductor's passes `remove_noop_ops`, `pointless_convert` and
`remove_no_ops` remove a copy that has no other users. The reinplacing pass then makes the operator
write in place, because the pass only checks whether the memory is used later, and not whether
another argument of the same call shares the memory.

This module therefore adds another copy to the trace, made by the custom operator `torchop::clone`,
which no pass removes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.library
from torch import Tensor

from torchop._compat import (
    compilers,
    dispatch,
    inductor_writes,
    libraries,
    registries,
    tracing,
)
from torchop._compat.classes import OpOverload, Tag
from torchop._core.call import map_tensors, mutated_tensors
from torchop._schema.schema import Argument, Schema


@compilers.never_traced
def _clone(x: Tensor) -> Tensor:
    return x.clone()


# Define the operator at import and not at the first trace, because a process may load a cached or
# exported graph that calls it without tracing.
_library = torch.library.Library("torchop", "FRAGMENT")
libraries.define(_library, "clone(Tensor x) -> Tensor", (Tag.pt2_compliant_tag,))
libraries.implement(_library, "clone", dispatch.kernel_key("default"), _clone)
registries.register_fake("torchop::clone", _clone, __name__)


def lasting_copy(mode: Any, tensor: Tensor) -> Tensor:
    """Return a copy made by `torchop::clone`, which compilers never remove from a graph."""
    with mode:
        copy: Tensor = torch.ops.torchop.clone.default(tensor)
    return copy


def keep_mutated_copies(
    mode: Any, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Make sure that compilers keep the copies that a traced call mutates.

    Otherwise Inductor removes the copy and makes the operator mutate the original tensor, which
    gives wrong results in two cases:

    - The original has a storage offset, as in `y = x[2].clone(); op(y)`. PyTorch has recorded that
      `y` has the storage offset 0 (`eager_input_vals` in torch/_inductor/pattern_matcher.py), so
      Inductor would pass the first elements of `x` instead of the row `x[2]`.
    - The original is an input of the graph, and the program also writes to it, as in
      `y = x.clone(); op(y); x.zero_()`. `can_inplace` in torch/_inductor/fx_passes/reinplace.py
      then lets the operator write into `x`, because the graph overwrites `x` at its end. But this
      also overwrites `y`. While a call is traced, later writes are unknown, so the copy of any
      input is kept.
    """
    for _, tensor in mutated_tensors(schema, args, kwargs):
        base = tracing.traced_base(tensor)
        node = tracing.traced_node(mode, base)
        sources = sources_of(node) - {node}
        if any(map(_is_unsafe_original, sources)) and not _writes_a_part(node):
            copy = lasting_copy(mode, base)
            with mode:
                base.copy_(copy)


def _is_unsafe_original(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" or tracing.may_have_offset(node)


def keep_returned_copies(graph: torch.fx.Graph) -> None:
    """Make sure that a copy of an input does not change when the program writes to the input again.

    In `op(x); y = x.clone(); op(x)`, where the program returns `y`, Inductor replaces `y` with the
    new value of `x` from the first call. It then lets this call write into the input, because
    `any_use_of_views_after_node` in torch/_inductor/fx_passes/reinplace.py ignores the uses of a
    call's result, so the second write also changes `y`.
    """
    (output,) = graph.find_nodes(op="output")
    for node in output.all_input_nodes if inductor_writes.has_writes(graph) else ():
        sources = sources_of(node)
        if any(map(_is_written_input, sources)) and (
            any(map(_is_copy, sources)) or any(map(inductor_writes.is_write, node.users))
        ):
            value = node.meta["val"]
            with graph.inserting_after(node), value.fake_mode:
                copy = graph.call_function(torch.ops.torchop.clone.default, (node,))
                copy.meta = {**node.meta, "val": value.clone()}
            output.replace_input_with(node, copy)


inductor_writes.before_copies_are_removed(keep_returned_copies)


def _is_written_input(node: torch.fx.Node) -> bool:
    """Return whether a node is the value of a graph input after the program has written to it."""
    is_scatter = node.target in _SCATTERS
    bases = node.args[:1] if is_scatter else inductor_writes.bases_of_result(node)
    return any(
        source.op == "placeholder" or _is_written_input(source)
        for base in bases
        if isinstance(base, torch.fx.Node)
        for source in sources_of(base) - {node}
    )


def _is_copy(node: torch.fx.Node) -> bool:
    return _may_be_removed(node) and node.target is not operator.getitem and not _is_view(node)


def copy_hidden_aliases(
    mode: Any, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Clone inputs that a compiler may turn into an alias of an argument that the call mutates."""
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    memory = {tracing.traced_memory(tensor) for tensor in mutated}
    sources: set[torch.fx.Node] = set()
    for tensor in mutated:
        sources |= sources_of(tracing.traced_node(mode, tensor))

    def separate(argument: Argument, tensor: Tensor) -> Any:
        if (
            argument.is_mutated
            # If the user's program itself passes the same memory twice, there is no copy to
            # protect.
            or tracing.traced_memory(tensor) in memory
            or not sources & sources_of(tracing.traced_node(mode, tensor))
        ):
            return tensor
        return lasting_copy(mode, tensor)

    return map_tensors(schema, args, kwargs, separate) if sources else (args, kwargs)


def sources_of(node: torch.fx.Node | None) -> set[torch.fx.Node]:
    """Return the nodes that `node` may share memory with once a compiler has removed copies."""
    sources: set[torch.fx.Node] = set()
    remaining = [] if node is None else [node]
    while remaining:
        node = remaining.pop()
        if node not in sources:
            sources.add(node)
            if node.target is torch.ops.aten.copy.default:
                remaining += node.all_input_nodes[-1:]  # the first input is only overwritten
            elif _may_be_removed(node):
                remaining += node.all_input_nodes
    return sources


def _writes_a_part(node: torch.fx.Node | None) -> bool:
    """Return whether a node overwrites only a part of a tensor.

    If so, the node's result is not a plain copy of another tensor.
    """
    if node is None or node.target not in _SCATTERS:
        return False
    written, part = node.args[:2]
    return tracing.have_different_shapes(written, part)


_SCATTERS = (torch.ops.aten.select_scatter.default, torch.ops.aten.slice_scatter.default)
# Compilers remove these operators if they would return their input unchanged. Compilers also remove
# views and operators whose names end in `_copy`.
_COPIES = frozenset(
    {
        "cat",
        "ceil",
        "clone",
        "constant_pad_nd",
        "contiguous",
        "convert_element_type",
        "copy",
        "device_put",
        "floor",
        "pow",
        "repeat",
        "round",
        "select_scatter",
        "slice_scatter",
        "trunc",
    }
)
_ARITHMETIC = frozenset({"add", "div", "mul", "sub"})


def _may_be_removed(node: torch.fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    name = target._overloadpacket.__name__
    if name in _ARITHMETIC:
        # Inductor removes an addition of 0 or a multiplication by 1, so the result may be an alias.
        return any(_is_constant(operand) for operand in node.all_input_nodes)
    return name in _COPIES or name.endswith("_copy") or _is_view(node)


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and all(map(_is_constant, node.all_input_nodes))
