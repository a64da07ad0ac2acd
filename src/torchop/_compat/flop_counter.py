"""What FlopCounterMode counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def flop_registry() -> dict[Any, Any]:
    """By packet, what FlopCounterMode counts.

    PyTorch does not find an entry again after an overload was added to its packet, whose hash that
    changes: such entries are put where they belong.
    """
    from torch.utils.flop_counter import flop_registry

    if any(packet not in flop_registry for packet in flop_registry):
        entries = list(flop_registry.items())
        flop_registry.clear()
        flop_registry.update(entries)
    return flop_registry


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the leaves of nested tuples, lists and dicts."""
    return torch.utils._pytree.tree_map(function, tree)
