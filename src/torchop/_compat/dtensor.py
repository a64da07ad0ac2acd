"""Access DTensor's sharding propagator, which chooses the placements of a call.

torchop never imports DTensor itself, and uses it only in programs that have imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from torchop._compat import import_hooks
from torchop._compat.classes import tree_leaves

_MODULE = "torch.distributed.tensor"


def when_imported(callback: Callable[[], None]) -> None:
    import_hooks.when_imported(_MODULE, callback)


def is_imported() -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and hasattr(module, "DTensor")


def has_dtensors(values: Any) -> bool:
    if not is_imported():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in tree_leaves(values))


def is_mixed(error: Exception) -> bool:
    """Return whether DTensor raised `error` because a call mixes plain tensors and DTensors."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def propagator() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


def clear_caches() -> None:
    """Clear DTensor's caches in this thread, so the next calls choose placements again."""
    propagator().propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
