"""Simulate ranks, and write the placements of DTensors as words, such as "S0" for Shard(0).

Uses private names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)

from torchop._compat.simulated_ranks import placed as placed
from torchop._compat.simulated_ranks import simulated_mesh as simulated_mesh
from torchop._compat.simulated_ranks import whole as whole

PLACEMENTS: dict[str, Placement] = {
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
    "P": Partial(),
}


def on_mesh(mesh: Any, tensor: Tensor, words: str = "R") -> DTensor:
    """Place a tensor on a mesh. `words` has one word per mesh dimension, or one for all of them."""
    placements = [PLACEMENTS[word] for word in words.split()]
    placements = placements * mesh.ndim if len(placements) == 1 else placements
    value: DTensor = placed(tensor, mesh, placements)
    return value


def words(value: Any) -> str:
    named = {repr(placement): word for word, placement in PLACEMENTS.items()}
    return " ".join(named.get(repr(p), repr(p)) for p in value.placements)


def gathered(value: Any) -> Tensor:
    """Return the full tensor, after checking that it is identical on all ranks."""
    return whole(value.full_tensor())


def assert_right(value: Any, expected: Tensor, placed: str | None = None) -> None:
    assert isinstance(value, DTensor)
    torch.testing.assert_close(gathered(value.detach()), expected)
    assert value.shape == expected.shape
    if placed is not None:
        assert words(value) == placed
