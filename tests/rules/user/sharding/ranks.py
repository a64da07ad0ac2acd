"""Simulated ranks for tests, and tensors that are placed on them by a word. Uses private names."""

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
    """A tensor placed on a mesh: `words` has one for each dimension, or one for all."""
    placements = [PLACEMENTS[word] for word in words.split()]
    placements = placements * mesh.ndim if len(placements) == 1 else placements
    value: DTensor = placed(tensor, mesh, placements)
    return value


def words(value: Any) -> str:
    """The placements of a DTensor."""
    named = {repr(placement): word for word, placement in PLACEMENTS.items()}
    return " ".join(named.get(repr(p), repr(p)) for p in value.placements)


def gathered(value: Any) -> Tensor:
    """The whole of a DTensor, about which all ranks agree."""
    return whole(value.full_tensor())


def assert_right(value: Any, expected: Tensor, placed: str | None = None) -> None:
    """Return whether a DTensor is what a plain call returned, and where it is."""
    assert isinstance(value, DTensor)
    torch.testing.assert_close(gathered(value.detach()), expected)
    assert value.shape == expected.shape
    if placed is not None:
        assert words(value) == placed
