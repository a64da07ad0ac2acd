"""Activation checkpointing: which calls it saves, and which it makes again."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any, cast

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
    """Makes a compiler keep what is traced here for the backward, and not compute it again.

    That is of nodes in a checkpointed region. In others, the compiler would take it for one.
    """
    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:
        yield
        return
    graph = cast(Any, proxy_mode).tracer.graph
    count = len(graph.nodes)
    yield
    for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - count):
        if node.meta.get("recompute") is not None:
            node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
