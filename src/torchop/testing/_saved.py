"""`saved_bytes`, which measures the memory that autograd saves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchop._compat import autograd
from torchop._compat.classes import tree_leaves


def saved_bytes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int:
    """Return the number of bytes that a call keeps alive for the backward pass.

    The number includes the storages of all tensors that the autograd graph saves, and of tensors
    stored as attributes of the `ctx` of an autograd function. Inputs and results of the call count
    too if they are saved. Each storage is counted once.

    Args:
        function: an operator, or a function that calls operators.
        args: the positional arguments. If no argument requires grad, nothing is saved.
        kwargs: the keyword arguments.

    Raises:
        Exception: the exception that the function raises, if any.

    Example:
        >>> import torch
        >>> from torchop.testing import saved_bytes
        >>> x = torch.zeros(100, requires_grad=True)
        >>> saved_bytes(torch.exp, x), saved_bytes(torch.exp, x.detach())
        (400, 0)

    `saved_bytes` is modeled on `jax.ad_checkpoint.print_saved_residuals`.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    # Record saved tensors with a hook, which autograd calls for every tensor that a node saves.
    # Reading them from the nodes afterwards would miss tensors, because a node gives no access to a
    # saved tensor that is also its own result.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = function(*args, **kwargs)
    outputs = [v for v in tree_leaves(results) if isinstance(v, Tensor) and v.requires_grad]
    for node in {node for node, _ in autograd.reached_edges(outputs)}:
        saved += [v for v in tree_leaves(getattr(node, "__dict__", {})) if isinstance(v, Tensor)]
    storages = {}
    for tensor in saved:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        else:
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(storages.values())
