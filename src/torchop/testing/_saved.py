"""saved_bytes: measure the memory that autograd saves for a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchop._compat.classes import tree_leaves


def saved_bytes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int:
    """Return the number of bytes that a call keeps alive for the backward pass.

    Counts the storages of all tensors that the autograd graph saves, and of tensors stored on the
    `ctx` of autograd functions, each storage once. Includes inputs and results that the backward
    needs.

    Args:
        function: an operator, or a function that calls operators.
        args: the positional arguments. If no argument requires grad, nothing is saved.
        kwargs: the keyword arguments.

    Raises:
        Exception: the function raised this exception.

    Example:
        >>> import torch
        >>> from torchop.testing import saved_bytes
        >>> x = torch.zeros(100, requires_grad=True)
        >>> saved_bytes(torch.exp, x), saved_bytes(torch.exp, x.detach())
        (400, 0)

    Modeled on `jax.ad_checkpoint.print_saved_residuals`.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    # The hooks make autograd keep results that a node saves. Without hooks, the node does not refer
    # to them.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = function(*args, **kwargs)
    for node in _nodes(results):
        saved += [v for v in tree_leaves(getattr(node, "__dict__", {})) if isinstance(v, Tensor)]
    storages = {}
    for tensor in saved:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        else:
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(storages.values())


def _nodes(results: Any) -> Iterator[Any]:
    """Yield the autograd nodes that are reachable from the results."""
    waiting = [value.grad_fn for value in tree_leaves(results) if isinstance(value, Tensor)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
