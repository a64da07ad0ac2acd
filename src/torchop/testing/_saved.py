"""saved_bytes: how much memory a call keeps alive for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchop._compat.classes import tree_leaves


def saved_bytes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int:
    """Returns how many bytes a call keeps alive for its backward.

    These are the storages of all tensors that the graph of autograd saves, or that hang on the
    `ctx` of one of its nodes, each counted once. Inputs and results count too, if the backward
    needs them.

    Args:
        function: an operator, or a function that calls some.
        args: its arguments, of which some should require grad; otherwise nothing is saved.
        kwargs: those by keyword.

    Raises:
        Exception: what the function raises.

    Example:
        >>> import torch
        >>> from torchop.testing import saved_bytes
        >>> x = torch.zeros(100, requires_grad=True)
        >>> saved_bytes(torch.exp, x), saved_bytes(torch.exp, x.detach())
        (400, 0)

    The idea is `jax.ad_checkpoint.print_saved_residuals`.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    # With a hook, autograd asks it, and would save a result without its node otherwise.
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
    """The nodes of the graph of autograd behind some results."""
    waiting = [value.grad_fn for value in tree_leaves(results) if isinstance(value, Tensor)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
