"""Activation checkpointing: which calls it saves, and which it makes again."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# The mode in which activation checkpointing sees the operators of a checkpointed region, and the
# one in which it takes their results from what was saved.
_MODES: tuple[Any, ...] = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
# Those that ask the policy of the region. The second did until 2.12, where it has to be told the
# same as the first; since then it remembers what the first was told.
POLICY_MODES: tuple[type, ...] = tuple(
    mode
    for mode in _MODES
    if "policy_fn" in inspect.unwrap(mode.__torch_dispatch__).__code__.co_names
)


def selective_checkpointing_is_active() -> bool:
    """Whether what this thread calls may be saved, or taken from what was, instead of computed."""
    return any(isinstance(mode, _MODES) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def saving_in_trace() -> Iterator[None]:
    """Make a compiler save what is traced here in a checkpointed region for the backward."""
    with _traced_nodes(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)) as nodes:
        yield
    for node in nodes:
        if node.meta.get("recompute") is not None:
            node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE


@contextlib.contextmanager
def saving_under_budget(proxy_mode: Any = None) -> Iterator[None]:
    """Make a compiler save what is traced here, whatever `activation_memory_budget` is.

    Args:
        proxy_mode: the mode that traces, by default the active one.
    """
    if proxy_mode is None:
        proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    with _traced_nodes(proxy_mode) as nodes:
        yield
    budget = torch._functorch.config.activation_memory_budget
    for node in nodes:
        if node.meta.get("recompute") is not None:
            continue  # in a checkpointed region, the policy of the region decides
        node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
        # Workaround for `choose_saved_values_set` (torch/_functorch/partitioners.py), which saves
        # nothing if the budget is 0, and fails on a saved tuple. The partitioner takes the budget
        # of the first node that has one for the whole graph.
        if isinstance(node.meta.get("val"), (tuple, list)):
            for other in node.graph.nodes:
                if other is node or "memory_budget" in other.meta:
                    other.meta["memory_budget"] = 1.0
        elif budget == 0:
            node.meta.setdefault("memory_budget", _SMALLEST_BUDGET)


_SMALLEST_BUDGET = 1e-9


@contextlib.contextmanager
def _traced_nodes(proxy_mode: Any) -> Iterator[list[torch.fx.Node]]:
    """Yield a list that holds, after the block, the nodes that were traced in it."""
    nodes: list[torch.fx.Node] = []
    if proxy_mode is None:
        yield nodes
        return
    graph = proxy_mode.tracer.graph
    count = len(graph.nodes)
    yield nodes
    nodes += itertools.islice(reversed(graph.nodes), len(graph.nodes) - count)


def new_context() -> Any:
    """Return the context that a policy function gets outside of a checkpointed region."""
    return checkpoint.SelectiveCheckpointContext(is_recompute=False)
