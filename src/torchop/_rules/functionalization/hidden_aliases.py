"""Protect clones that a compiler may remove although an operator writes the cloned memory.

`y = x.clone(); reverse(y, x)` is correct only while `y` is a copy. Workaround for
pytorch/pytorch#198031: Inductor's passes `remove_noop_ops`, `pointless_convert` and `remove_no_ops`
remove a copy without other users, and the reinplacing pass then lets the operator write in place.
It considers later readers of the memory only, not the other arguments of the operator.

`torchop::clone` adds a copy that no pass removes; the original clone is removed instead.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.library
from torch import Tensor

from torchop._compat import compilers, dispatch, libraries, registries, tracing
from torchop._compat.classes import OpOverload, Tag
from torchop._core.call import map_tensors, mutated_tensors
from torchop._schema.schema import Argument, Schema


@compilers.never_traced
def _clone(x: Tensor) -> Tensor:
    return x.clone()


# Defined at import, because a cached or exported graph may call it without a trace.
_library = torch.library.Library("torchop", "FRAGMENT")
libraries.define(_library, "clone(Tensor x) -> Tensor", (Tag.pt2_compliant_tag,))
libraries.implement(_library, "clone", dispatch.kernel_key("default"), _clone)
registries.FakeRegistration("torchop::clone", _clone, __name__).push()


def copy_hidden_aliases(
    mode: Any, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a traced call, with `torchop::clone` of removable copies."""
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    memory = {tracing.traced_memory(tensor) for tensor in mutated}
    sources: set[torch.fx.Node] = set()
    for tensor in mutated:
        sources |= _sources(tracing.traced_node(mode, tensor))

    def separate(argument: Argument, tensor: Tensor) -> Any:
        if (
            argument.is_mutated
            # the program itself passes two views of the same memory
            or tracing.traced_memory(tensor) in memory
            or not sources & _sources(tracing.traced_node(mode, tensor))
        ):
            return tensor
        with mode:
            return torch.ops.torchop.clone.default(tensor)

    # Tensors have no node without a graph.
    return map_tensors(schema, args, kwargs, separate) if sources else (args, kwargs)


def _sources(node: torch.fx.Node | None) -> set[torch.fx.Node]:
    """Return the nodes whose memory `node` may share after compilers removed copies."""
    sources: set[torch.fx.Node] = set()
    remaining = [] if node is None else [node]
    while remaining:
        node = remaining.pop()
        if node not in sources:
            sources.add(node)
            if _may_be_removed(node):
                remaining += node.all_input_nodes
    return sources


# Operators that may return an unchanged input. Views and `..._copy` operators are matched
# separately.
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
        # A no-op with 0 in a sum, or 1 in a product.
        return any(_is_constant(operand) for operand in node.all_input_nodes)
    return (
        name in _COPIES
        or name.endswith("_copy")
        or any(result.alias_info is not None for result in target._schema.returns)
    )


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and all(map(_is_constant, node.all_input_nodes))
