"""DTensor: whether it is in use, and what it remembers of operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from torchop._compat import import_hooks
from torchop._compat.classes import tree_leaves

_MODULE = "torch.distributed.tensor"


def when_imported(callback: Callable[[], None]) -> None:
    """Calls `callback` when DTensor is there, which torchop does not import."""
    import_hooks.when_imported(_MODULE, callback)


def is_imported() -> bool:
    """Whether DTensor can be in use."""
    module = sys.modules.get(_MODULE)
    return module is not None and hasattr(module, "DTensor")


def has_dtensors(values: Any) -> bool:
    """Whether there is a DTensor among values that are in tuples, lists and dicts."""
    if not is_imported():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in tree_leaves(values))


def is_mixed(error: Exception) -> bool:
    """Whether this is what DTensor raises for a call with plain tensors too."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def propagator() -> Any:
    """What decides where the tensors of a call have to be, one for the process."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


def clear_caches() -> None:
    """Forgets what this thread has propagated: calls ask the strategies again."""
    propagator().propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
