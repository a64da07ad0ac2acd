"""What FlopCounterMode counts."""

from __future__ import annotations

from typing import Any


def registry() -> dict[Any, Any]:
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
