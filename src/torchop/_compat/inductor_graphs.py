"""Capture the graph from which Inductor would generate code, after all graph passes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.fx import Graph, Node

_VIEWS = frozenset(
    {"alias", "as_strided", "expand", "permute", "reshape", "select", "slice", "squeeze", "t"}
    | {"transpose", "unsqueeze", "view"}
)


class Lowered(NamedTuple):
    """A graph from which Inductor is about to generate code.

    `inputs` maps each graph input to its name in the source code of the compiled function.
    """

    graph: Graph
    inputs: Mapping[Node, str]


class _LoweredError(Exception):
    """Raised to stop Inductor before it generates code."""


def lowered_graph(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Lowered | None:
    """Compile a function without running it, and return the forward graph.

    Returns None if the graph is empty, since Inductor then has nothing to compile.
    """
    import torch._dynamo  # slow imports
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    graphs: list[Graph] = []
    sources: list[str] = []
    thread, run = threading.get_ident(), GraphLowering.run

    def record(self: Any, *inputs: Any) -> Any:
        if threading.get_ident() != thread:  # another thread compiles its own graph
            return run(self, *inputs)
        graphs.append(self.module.graph)
        raise _LoweredError

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        sources.extend(map(_source, module.graph.find_nodes(op="placeholder")))
        return compile_fx(module, inputs)

    # Disable the caches, because Inductor does not call `GraphLowering.run` on a cache hit.
    caches = (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    original = getattr(function, "_torchdynamo_orig_callable", function)
    original = getattr(original, "_orig_mod", original)
    compiled = torch.compile(original, backend=backend, fullgraph=True)
    with caches[0], caches[1], mock.patch.object(GraphLowering, "run", record):
        try:
            compiled(*args, **kwargs)
        except BackendCompilerFailed:
            if not graphs:
                raise
    if not graphs:
        return None
    names = {}
    for place, node in enumerate(graphs[0].find_nodes(op="placeholder")):
        index = _input_index(node, place)
        names[node] = sources[index] if index is not None and index < len(sources) else node.name
    return Lowered(graphs[0], names)


def _source(node: Node) -> str:
    """Return a graph input's name in the user's source code, such as `x` or `layer.weight`."""
    source: Any = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    name = name() if callable(name) else name
    name = re.sub(r"^[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:buffers|parameters|modules)\['([^']+)'\]", r".\1", name)
    return str(name).removeprefix("self.")


def _input_index(node: Node, place: int) -> int | None:
    """Return the index of the input of Dynamo's graph that became `node` in AOTAutograd's graph.

    Returns None if AOTAutograd added the input, for example the seed of a random operator.
    """
    described = node.meta.get("desc")
    if described is None:
        return place
    while hasattr(described, "base_of"):
        described = described.base_of
    index = getattr(described, "idx", None)
    return index if isinstance(index, int) else None


def view_root(node: Node) -> Node:
    """Follow a chain of views, and return the node at its root."""
    while _name(node) in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_clone(node: Node) -> bool:
    return _name(node) == "clone"


def is_inserted_clone(node: Node) -> bool:
    """Return whether a node is a clone that Inductor inserted.

    Inductor uses `clone_preserve_strides` for its clones, so the input of such a clone is an
    `as_strided` node.
    """
    return is_clone(node) and _name(node.all_input_nodes[0]) == "as_strided"


def is_copy_back(node: Node) -> bool:
    """Return whether a node is a `copy_` into an input of the graph."""
    return _name(node) == "copy_"


def written(node: Node) -> Iterator[tuple[str, Node]]:
    if isinstance(node.target, torch._ops.OpOverload):
        infos = {a.name: a.alias_info for a in node.target._schema.arguments}
        for name, value in passed(node):
            if (info := infos[name]) is not None and info.is_write:
                yield name, value


def passed(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield (argument name, node) for each node that is passed to an operator call."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    values = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    for argument in arguments:
        for value in torch.utils._pytree.tree_leaves(values.get(argument.name)):
            if isinstance(value, Node):
                yield argument.name, value


def size_in_bytes(node: Node) -> int:
    """Return the size of a tensor in bytes, using the hints of symbolic sizes."""
    value = node.meta["val"]
    numel = value.numel()
    return int(getattr(getattr(numel, "node", None), "hint", numel)) * int(value.element_size())


def _name(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "torchop"):
        return str(target._overloadpacket.__name__)
    return ""
