"""Copies that a compiler may remove, after which an operator reads the memory that it writes.

`y = x.clone(); reverse(y, x)` is right as long as `y` is a copy. Inductor removes a copy (in its
passes `remove_noop_ops`, `pointless_convert` and `remove_no_ops`) if no other node of the graph
depends on it. Then it decides whether the operator may write in place, and up to PyTorch 2.13 it
considers only the nodes that read the memory after the operator, not the operator itself.

So `torchop::clone` makes one more copy of such an argument. No pass knows this operator: its copy
stays, and the original one is removed.
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


# At import, not when a trace needs it: a cached or exported graph that calls it is loaded without a
# trace.
_library = torch.library.Library("torchop", "FRAGMENT")
libraries.define(_library, "clone(Tensor x) -> Tensor", (Tag.pt2_compliant_tag,))
libraries.implement(_library, "clone", dispatch.kernel_key("default"), _clone)
registries.FakeRegistration("torchop::clone", _clone, __name__).push()


def copy_hidden_aliases(
    mode: Any, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a traced call, with lasting copies in place of those that may be removed."""
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    memory = {tracing.traced_memory(tensor) for tensor in mutated}
    sources: set[torch.fx.Node] = set()
    for tensor in mutated:
        sources |= _sources(tracing.traced_node(mode, tensor))

    def separate(argument: Argument, tensor: Tensor) -> Any:
        if (
            argument.is_mutated
            # The program itself passes two views of the same memory.
            or tracing.traced_memory(tensor) in memory
            or not sources & _sources(tracing.traced_node(mode, tensor))
        ):
            return tensor
        with mode:
            return torch.ops.torchop.clone.default(tensor)

    # Outside a recorded graph, no tensor has a node.
    return map_tensors(schema, args, kwargs, separate) if sources else (args, kwargs)


def _sources(node: torch.fx.Node | None) -> set[torch.fx.Node]:
    """The nodes whose memory a node may share after compilers have removed copies."""
    sources: set[torch.fx.Node] = set()
    remaining = [] if node is None else [node]
    while remaining:
        node = remaining.pop()
        if node not in sources:
            sources.add(node)
            if _may_be_removed(node):
                remaining += node.all_input_nodes
    return sources


# Operators that return the values of an input, at least for certain arguments; views and operators
# named `..._copy` are not listed.
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
        # With a constant operand, which may be 0 for a sum and 1 for a product.
        return any(_is_constant(operand) for operand in node.all_input_nodes)
    return (
        name in _COPIES
        or name.endswith("_copy")
        or any(result.alias_info is not None for result in target._schema.returns)
    )


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and all(map(_is_constant, node.all_input_nodes))
