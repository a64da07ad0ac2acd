"""Copies that a compiler may take out, so that an operator reads the memory it writes.

`y = x.clone(); reverse(y, x)` is right as long as `y` is a copy. Inductor takes a copy out (its
passes `remove_noop_ops`, `pointless_convert` and `remove_no_ops`) when nothing else in the graph
could tell. Then it decides whether the operator may write in place, and up to PyTorch 2.13 it looks
only at what reads the memory after the operator, not at the operator itself.

Such a copy is made by an operator of ours instead, which no pass knows: it then is the one copy.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.library
from torch import Tensor

from torchop._compat import compilers, dispatch, functionalization, libraries, registries
from torchop._compat.classes import OpOverload, Tag
from torchop._core.contract import map_arguments, mutated_tensors
from torchop._schema.schema import Argument, Schema


@compilers.never_traced
def _clone(x: Tensor) -> Tensor:
    return x.clone()


# From the import on: a cached or exported graph that names it is loaded without a trace.
_library = torch.library.Library("torchop", "FRAGMENT")
libraries.define(_library, "clone(Tensor x) -> Tensor", (Tag.pt2_compliant_tag,))
libraries.implement(_library, "clone", dispatch.kernel_key("default"), _clone)
registries.push_fake("torchop::clone", _clone, __name__)


def broken(
    mode: Any, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a traced call, with copies that stay instead of copies that may not.

    Args:
        mode: the `FunctionalTensorMode` of the trace.
        schema: that of the operator, which mutates.
        args, kwargs: the arguments of the call.
    """
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    memory = {functionalization.traced_memory(tensor) for tensor in mutated}
    sources: set[torch.fx.Node] = set()
    for tensor in mutated:
        sources |= _sources(functionalization.traced_node(mode, tensor))

    def kept_apart(argument: Argument, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and argument.is_tensor_list:
            return [kept_apart(argument, item) for item in value]
        if (
            argument.is_mutated
            or not isinstance(value, Tensor)
            # The program itself passes views of one memory.
            or functionalization.traced_memory(value) in memory
            or not sources & _sources(functionalization.traced_node(mode, value))
        ):
            return value
        with mode:
            return torch.ops.torchop.clone.default(value)

    # Without a graph that is being recorded, nothing has a node.
    return map_arguments(schema, args, kwargs, kept_apart) if sources else (args, kwargs)


def _sources(node: torch.fx.Node | None) -> set[torch.fx.Node]:
    """The nodes whose memory a node may turn out to have, once copies are taken out."""
    found: set[torch.fx.Node] = set()
    remaining = [] if node is None else [node]
    while remaining:
        node = remaining.pop()
        if node not in found:
            found.add(node)
            if _may_be_taken_out(node):
                remaining += node.all_input_nodes
    return found


# What computes nothing, or nothing for certain arguments; besides views, and `..._copy`.
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


def _may_be_taken_out(node: torch.fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    name = target._overloadpacket.__name__
    if name in _ARITHMETIC:
        # Adding 0 or multiplying by 1, where constants are known to be that.
        return any(_is_constant(operand) for operand in node.all_input_nodes)
    return (
        name in _COPIES
        or name.endswith("_copy")
        or any(result.alias_info is not None for result in target._schema.returns)
    )


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and all(map(_is_constant, node.all_input_nodes))
