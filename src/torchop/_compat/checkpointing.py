"""Activation checkpointing: detect the dispatch modes, and mark traced nodes as saved."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# The dispatch modes in which PyTorch runs a checkpointed region's forward and its recomputation.
_MODES: tuple[Any, ...] = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
# The modes that call the region's policy function. In 2.11, the recomputation's mode also calls the
# policy function, which must make the same decisions as in the forward. Since 2.12, that mode uses
# the recorded decisions.
POLICY_MODES: tuple[type, ...] = tuple(
    mode
    for mode in _MODES
    if "policy_fn" in inspect.unwrap(mode.__torch_dispatch__).__code__.co_names
)


def selective_checkpointing_is_active() -> bool:
    """Return whether a mode that selectively saves or replays results is active."""
    return any(isinstance(mode, _MODES) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def saving_in_trace() -> Iterator[None]:
    """Mark the nodes traced in this block as saved, if they are in a checkpointed region."""
    with _traced_nodes(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)) as nodes:
        yield
    for node in nodes:
        if node.meta.get("recompute") is not None:
            node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE


@contextlib.contextmanager
def saving_under_budget(proxy_mode: Any = None) -> Iterator[None]:
    """Mark the nodes traced in this block as saved, whatever `activation_memory_budget` says.

    Args:
        proxy_mode: the tracing mode; by default, the active one.
    """
    if proxy_mode is None:
        proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    with _traced_nodes(proxy_mode) as nodes:
        yield
    budget = torch._functorch.config.activation_memory_budget
    for node in nodes:
        if node.meta.get("recompute") is not None:
            continue  # the policy of the checkpointed region takes precedence
        node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
        # Workaround for pytorch/pytorch#190758: `choose_saved_values_set`
        # (torch/_functorch/partitioners.py) saves nothing if the budget is 0, and fails on a saved
        # tuple. Override the budget: the partitioner uses the first `memory_budget` that it finds
        # on a node, for the whole graph.
        if isinstance(node.meta.get("val"), (tuple, list)):
            for other in node.graph.nodes:
                if other is node or "memory_budget" in other.meta:
                    other.meta["memory_budget"] = 1.0
        elif budget == 0:
            node.meta.setdefault("memory_budget", _SMALLEST_BUDGET)


_SMALLEST_BUDGET = 1e-9


@contextlib.contextmanager
def _traced_nodes(proxy_mode: Any) -> Iterator[list[torch.fx.Node]]:
    """Yield a list; at the end of the block, add the nodes that were traced in the block to it."""
    nodes: list[torch.fx.Node] = []
    if proxy_mode is None:
        yield nodes
        return
    graph = proxy_mode.tracer.graph
    count = len(graph.nodes)
    yield nodes
    nodes += itertools.islice(reversed(graph.nodes), len(graph.nodes) - count)


def new_context() -> Any:
    """Return the context that policy functions receive outside of a checkpointed region."""
    return checkpoint.SelectiveCheckpointContext(is_recompute=False)
