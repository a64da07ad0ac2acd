"""Find the operators in FX graphs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from torchop._compat import torch_ops
from torchop._compat.classes import OpOverload, OpOverloadPacket


def nodes_in(graph: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of its subgraphs."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


# Finds the operator's name in the first argument of `torchop::in_autocast`, which calls an operator
# by its name.
CALLED_BY_NAME = re.compile(r"\('(\w+)::(\w+)(?:\.(\w+))?', \[")


def operators_in(graph: GraphModule) -> list[OpOverload]:
    """Return the operators that a graph calls or passes to higher-order operators, sorted."""
    nodes = nodes_in(graph)
    inputs = [value for n in nodes for value in (n.target, *n.args, *n.kwargs.values())]
    texts = (CALLED_BY_NAME.match(value) for value in inputs if isinstance(value, str))
    inputs += [torch_ops.live_overload(*match.groups("")) for match in texts if match]
    values = {value for value in inputs if isinstance(value, (OpOverload, OpOverloadPacket))}
    packets = (value for value in values if isinstance(value, OpOverloadPacket))
    overloads = (getattr(packet, name) for packet in packets for name in packet.overloads())
    found = {op for op in (*values, *overloads) if isinstance(op, OpOverload)}
    return sorted(found, key=OpOverload.name)
