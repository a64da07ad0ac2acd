"""Activation checkpointing: which calls it saves, and which it makes again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch

from torchop._compat import dispatch


def checkpoint_mode() -> type | None:
    """The mode in which activation checkpointing sees the operators of a checkpointed region."""
    import torch.utils.checkpoint

    return getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", None)


def selective_checkpointing_is_active() -> bool:
    """Whether what this thread calls may be saved, or taken from what was, instead of computed."""
    if not dispatch.dispatch_modes_are_active():
        return False
    import torch.utils.checkpoint as checkpointing
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    classes = tuple(getattr(checkpointing, name) for name in names if hasattr(checkpointing, name))
    return any(isinstance(mode, classes) for mode in _get_current_dispatch_mode_stack())


def checkpoint_policies() -> Any:
    """The enumeration of what selective checkpointing may do with the result of a call."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy


@contextlib.contextmanager
def saving_in_trace() -> Iterator[None]:
    """Makes a compiler keep what is traced here for the backward, and not compute it again."""
    from torch.utils.checkpoint import CheckpointPolicy

    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:
        yield
        return
    graph = cast(Any, proxy_mode).tracer.graph
    count = len(graph.nodes)
    yield
    for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - count):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
