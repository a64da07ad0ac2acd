"""Activation checkpointing: detect the dispatch modes, and save the results of traced nodes."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# For selective checkpointing, PyTorch runs the forward of a region in the first of these dispatch
# modes, and the recomputation in the second.
_MODES: tuple[Any, ...] = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
# The modes that call the user's policy function, which decides whether to save a result. In 2.11,
# the recomputation's mode also calls it, and the function must decide as it did in the forward.
# Since 2.12, that mode reuses the decisions of the forward.
POLICY_MODES: tuple[type, ...] = tuple(
    mode
    for mode in _MODES
    if "policy_fn" in inspect.unwrap(mode.__torch_dispatch__).__code__.co_names
)


def selective_checkpointing_is_active() -> bool:
    return any(isinstance(mode, _MODES) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def saving_in_trace() -> Iterator[None]:
    """Make a checkpointed region save the results of the nodes that are traced in this block."""
    with _traced_nodes(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)) as nodes:
        yield
    for node in nodes:
        if node.meta.get("recompute") is not None:
            node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE


@contextlib.contextmanager
def saving_under_budget(proxy_mode: Any = None) -> Iterator[None]:
    """Make the partitioner save the results of the nodes that are traced in this block.

    The partitioner saves them even if the setting `activation_memory_budget` allows less memory. In
    a checkpointed region, the region's policy decides instead.
    """
    if proxy_mode is None:
        proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    with _traced_nodes(proxy_mode) as nodes:
        yield
    budget = torch._functorch.config.activation_memory_budget
    for node in nodes:
        if node.meta.get("recompute") is not None:
            continue
        node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
        # Workaround for pytorch/pytorch#190758: with a budget of 0, `choose_saved_values_set`
        # (torch/_functorch/partitioners.py) saves nothing, even if a node is marked MUST_SAVE. With
        # a budget below 1, it fails if the value of the marked node is a tuple. Until this is
        # fixed, override the budget of the whole graph: the partitioner uses the first
        # `memory_budget` that it finds on a node.
        if isinstance(node.meta.get("val"), (tuple, list)):
            for other in node.graph.nodes:
                if other is node or "memory_budget" in other.meta:
                    other.meta["memory_budget"] = 1.0
        elif budget == 0:
            node.meta.setdefault("memory_budget", _SMALLEST_BUDGET)


_SMALLEST_BUDGET = 1e-9


@contextlib.contextmanager
def _traced_nodes(proxy_mode: Any) -> Iterator[list[torch.fx.Node]]:
    """Yield an empty list. When the block ends, add the nodes that were traced in the block."""
    nodes: list[torch.fx.Node] = []
    if proxy_mode is None:
        yield nodes
        return
    graph = proxy_mode.tracer.graph
    count = len(graph.nodes)
    yield nodes
    nodes += itertools.islice(reversed(graph.nodes), len(graph.nodes) - count)


def new_context() -> Any:
    """Return the context object to pass to a policy function outside of a checkpointed region."""
    return checkpoint.SelectiveCheckpointContext(is_recompute=False)
