"""Activation checkpointing: which calls it saves, and which it makes again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# The mode in which activation checkpointing sees the operators of a checkpointed region, and the
# one in which it takes their results from what was saved.
CHECKPOINT_MODE: type | None = getattr(checkpoint, "_CachingTorchDispatchMode", None)
_REPLAY_MODE: type | None = getattr(checkpoint, "_CachedTorchDispatchMode", None)


def selective_checkpointing_is_active() -> bool:
    """Whether what this thread calls may be saved, or taken from what was, instead of computed."""
    modes = tuple(mode for mode in (CHECKPOINT_MODE, _REPLAY_MODE) if mode is not None)
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def saving_in_trace() -> Iterator[None]:
    """Makes a compiler keep what is traced here for the backward, and not compute it again."""
    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:
        yield
        return
    graph = cast(Any, proxy_mode).tracer.graph
    count = len(graph.nodes)
    yield
    for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - count):
        node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
