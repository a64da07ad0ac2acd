"""Activation checkpointing: detect its dispatch modes, and make traced nodes save their results."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# The dispatch modes of selective checkpointing. The first is active during the forward pass of a
# region, and the second while the region is recomputed in the backward pass.
_MODES: tuple[Any, ...] = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
# The dispatch modes that call the user's policy function, which decides for each operator whether
# to save its result. Since 2.12, only the mode for the forward pass calls it. In 2.11, the mode for
# the recomputation calls it too, so the policy function must make the same decision both times.
POLICY_MODES: tuple[type, ...] = tuple(
    mode
    for mode in _MODES
    if "policy_fn" in inspect.unwrap(mode.__torch_dispatch__).__code__.co_names
)


def selective_checkpointing_is_active() -> bool:
    return any(isinstance(mode, _MODES) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def saving_in_trace() -> Iterator[None]:
    """Make an enclosing checkpointed region save the results of all nodes traced in this block."""
    with traced_nodes() as nodes:
        yield
    for node in nodes:
        if node.meta.get("recompute") is not None:
            node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE


_SMALLEST_BUDGET = 1e-9


def mark(nodes: Iterable[torch.fx.Node], policy: Any) -> None:
    """Make AOTAutograd's partitioner save or recompute the results of FX nodes.

    `policy` is a `CheckpointPolicy`. The partitioner treats PREFER_RECOMPUTE like MUST_RECOMPUTE
    and ignores PREFER_SAVE, so PREFER_SAVE is replaced with MUST_SAVE.
    """
    if policy.name.endswith("SAVE"):
        policy = checkpoint.CheckpointPolicy.MUST_SAVE
    budget = torch._functorch.config.activation_memory_budget
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, (torch.Tensor, tuple, list)):
            continue  # sizes are cheap
        node.meta["recompute"] = policy
        if policy is not checkpoint.CheckpointPolicy.MUST_SAVE:
            continue
        # Workaround for pytorch/pytorch#190758: MUST_SAVE alone does not make the partitioner save
        # a result. With a budget of 0, `choose_saved_values_set` (torch/_functorch/partitioners.py)
        # saves nothing. With any budget below 1, it raises an error if a MUST_SAVE node returns a
        # tuple. Until this is fixed, set `memory_budget` on the node: the partitioner takes the
        # first `memory_budget` that it finds on any node as the budget of the whole graph.
        if isinstance(value, (tuple, list)):
            for other in node.graph.nodes:
                if other is node or "memory_budget" in other.meta:
                    other.meta["memory_budget"] = 1.0
        elif budget == 0:
            node.meta.setdefault("memory_budget", _SMALLEST_BUDGET)


@contextlib.contextmanager
def traced_nodes(proxy_mode: Any = None) -> Iterator[list[torch.fx.Node]]:
    """Yield a list that receives the FX nodes traced in the `with` block when the block ends."""
    nodes: list[torch.fx.Node] = []
    if proxy_mode is None:
        proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:
        yield nodes
        return
    graph = proxy_mode.tracer.graph
    count = len(graph.nodes)
    yield nodes
    nodes += itertools.islice(reversed(graph.nodes), len(graph.nodes) - count)


def policy_of_region(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the policy of the enclosing checkpointed region for a call, or None outside of one."""
    modes = reversed(_get_current_dispatch_mode_stack())
    mode: Any = next((mode for mode in modes if isinstance(mode, POLICY_MODES)), None)
    return None if mode is None else mode.policy_fn(new_context(), op, *args, **kwargs)


def new_context() -> Any:
    """Return a context object for calling a policy function outside of a checkpointed region."""
    return checkpoint.SelectiveCheckpointContext(is_recompute=False)
