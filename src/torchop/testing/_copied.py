"""`copied_bytes`, which measures the copies that Inductor inserts because of mutations."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from torchop._compat import inductor_graphs
from torchop._compat.inductor_graphs import Lowered
from torchop._rules.layout import layouts_of
from torchop.extend import OpOverload


def copied_bytes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, int]:
    """Return the bytes that a compiled function copies because of operators' declarations.

    An operator may declare that it mutates an argument, or that it needs an argument in a certain
    layout (see `register_layout`). Both declarations may cause copies.

    If the previous value of a mutated argument may be read later, Inductor passes a copy of the
    argument to the operator. If the argument is an input of the graph, Inductor also copies the new
    value back. For a large cache, these copies can take longer than the operator itself. Arguments
    that do not have the declared layout are copied as well.

    The function is compiled with `fullgraph=True`, but not run. Copies in the backward pass and in
    the bodies of branches, loops and nested regions do not count.

    Args:
        function: a function, a module or an operator, compiled or not.
        args: the arguments of the function.
        kwargs: the keyword arguments of the function.

    Returns:
        A dict from the name of each copied argument to the number of bytes copied. An item of a
        list has a name like `"caches[0]"`, and a parameter or buffer is named by its key in
        `state_dict`. A tensor that the function itself computes is named by the operator's
        argument, such as `"mylib::update.cache"`.

    Raises:
        Exception: the exception that tracing the function raises, for example because of a graph
            break.

    Example:
        >>> import torch, torchop
        >>> from torchop.testing import copied_bytes
        >>> @torchop.custom_op("docs::append", mutates_args=("cache",))
        ... def append(cache: torch.Tensor, row: torch.Tensor) -> None:
        ...     cache[0] = row
        >>> def once(cache, row):
        ...     append(cache, row)
        ...     return cache.sum()
        >>> def twice(cache, row):
        ...     append(cache, row)
        ...     before = cache.sum()
        ...     append(cache, row + 1)
        ...     return before * 2
        >>> cache, row = torch.zeros(8, 4), torch.ones(4)
        >>> copied_bytes(once, cache, row), copied_bytes(twice, cache, row)
        ({}, {'cache': 256})
    """
    lowered = inductor_graphs.lowered_graph(function, args, kwargs)
    if lowered is None:
        return {}
    clones = _clones(lowered)
    copied: dict[str, int] = {}
    for clone, name in clones.items():
        copied[name] = copied.get(name, 0) + inductor_graphs.size_in_bytes(clone)
    for node in filter(inductor_graphs.is_copy_back, lowered.graph.nodes):
        # If the operator writes into the input directly, the graph contains `x.copy_(x)`, which is
        # a no-op. So count a copy only if its source is a clone, or the new value returned by a
        # functional helper operator.
        target, value = (inductor_graphs.view_root(node.all_input_nodes[n]) for n in (0, -1))
        is_cloned = value in clones
        if target in lowered.inputs and (is_cloned or _is_written_copy(value)):
            size = inductor_graphs.size_in_bytes(node.all_input_nodes[0])
            name = lowered.inputs[target]
            # A functional helper operator clones the argument before it writes the new value, so
            # count the clone as well as the copy back.
            copied[name] = copied.get(name, 0) + size * (1 if is_cloned else 2)
    for node, name in _copies_of_layouts(lowered):
        copied[name] = copied.get(name, 0) + inductor_graphs.size_in_bytes(node)
    return {_parameter(function, name): size for name, size in copied.items()}


def _clones(lowered: Lowered) -> dict[Node, str]:
    """Map each copy that Inductor passes to an operator to the name of the copied tensor."""
    copies_back = [*filter(inductor_graphs.is_copy_back, lowered.graph.nodes)]
    copied_back = {inductor_graphs.view_root(node.all_input_nodes[-1]) for node in copies_back}
    mutated = {inductor_graphs.view_root(node.all_input_nodes[0]) for node in copies_back}
    clones: dict[Node, str] = {}
    for node in lowered.graph.nodes:
        for argument, value in inductor_graphs.written(node):
            root = inductor_graphs.view_root(value)
            is_ours = inductor_graphs.is_inserted_clone(root) or (
                inductor_graphs.is_clone(root) and root in copied_back
            )
            if is_ours and root not in clones and not inductor_graphs.is_copy_back(node):
                origin = inductor_graphs.view_root(root.all_input_nodes[0])
                if origin in lowered.inputs and origin not in mutated:
                    continue  # the program itself makes this copy
                name = clones.get(origin) or lowered.inputs.get(origin)
                clones[root] = name or f"{node.target._schema.name}.{argument}"
    return clones


def _copies_of_layouts(lowered: Lowered) -> Iterator[tuple[Node, str]]:
    """Yield each copy that a declared layout causes, with the name of the copied tensor."""
    for node in lowered.graph.nodes:
        if isinstance(node.target, OpOverload) and (layouts := layouts_of(node.target)):
            for argument, value in inductor_graphs.passed(node):
                if argument in layouts and inductor_graphs.is_clone(value):
                    origin = inductor_graphs.view_root(value.all_input_nodes[0])
                    name = lowered.inputs.get(origin)
                    yield value, name or f"{node.target._schema.name}.{argument}"


def _is_written_copy(node: Node) -> bool:
    """Return whether a node is an argument's updated copy, as returned by a helper operator.

    torchop's helper operators whose names end in `__functional` copy the arguments to be mutated,
    write into the copies and return them.
    """
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return str(node.target).partition(".default")[0].endswith("__functional")


def _parameter(function: Callable[..., Any], name: str) -> str:
    """Replace the start of a name such as "args[0]" with the name of the function's parameter."""
    found = re.match(r"args\[(\d+)\]", name)
    if found is None:
        return name
    parameters = [*inspect.signature(function).parameters]
    index = int(found[1])
    is_named = index < len(parameters) and "args" not in parameters
    return parameters[index] + name[found.end() :] if is_named else name
