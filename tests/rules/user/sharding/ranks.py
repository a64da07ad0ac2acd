"""Simulated ranks for tests, and tensors that are placed on them by a word."""

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

from torchop._compat import simulated_ranks

PLACEMENTS: dict[str, Placement] = {
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
    "P": Partial(),
}


def on_mesh(mesh: Any, tensor: Tensor, words: str = "R") -> DTensor:
    """A tensor placed on a mesh: `words` has one for each dimension, or one for all."""
    placed = [PLACEMENTS[word] for word in words.split()]
    placed = placed * mesh.ndim if len(placed) == 1 else placed
    value: DTensor = simulated_ranks.placed(tensor, mesh, placed)
    return value


def words(value: Any) -> str:
    """The placements of a DTensor."""
    named = {repr(placement): word for word, placement in PLACEMENTS.items()}
    return " ".join(named.get(repr(p), repr(p)) for p in value.placements)


def gathered(value: Any) -> Tensor:
    """The whole of a DTensor, about which all ranks agree."""
    return simulated_ranks.whole(value.full_tensor())


def assert_right(value: Any, expected: Tensor, placed: str | None = None) -> None:
    """Whether a DTensor is what a plain call returned, and where it is."""
    assert isinstance(value, DTensor)
    torch.testing.assert_close(gathered(value.detach()), expected)
    assert value.shape == expected.shape
    if placed is not None:
        assert words(value) == placed
