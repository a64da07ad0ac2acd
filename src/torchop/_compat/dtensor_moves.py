"""The tensors of a call on DTensors: where they are, and what it costs to move them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from torchop._compat.dtensor_calls import Row

Placements: TypeAlias = tuple[Any, ...]  # of one tensor, for each dimension of the mesh
Combination: TypeAlias = tuple[Row, ...]  # a row for each dimension of the mesh


class Inputs:
    """The tensors of a call: where they are, and what it costs to move them.

    Attributes:
        strategies: DTensor's strategy for each.
        current: the placements of each.
        mesh: the mesh that they are on.
    """

    def __init__(self, strategies: Sequence[Any], mesh: Any) -> None:
        self.strategies = strategies
        self.mesh = mesh
        specs = [strategy.strategies[0].output_spec for strategy in strategies]
        self.current: list[Placements] = [spec.placements for spec in specs]
        # Tensors of one shape on the same placements cost the same, and often there are many.
        kinds: dict[Any, int] = {}
        self._kinds = [
            # Symbolic sizes have no hash.
            kinds.setdefault(spec, index) if _is_static(spec) else index
            for index, spec in enumerate(specs)
        ]
        self._costs: dict[tuple[int, Placements], list[Any]] = {}
        self._fits: dict[tuple[int, Placements], bool] = {}

    @property
    def are_certain(self) -> bool:
        """Whether each tensor is at one place only, and has sizes that are numbers."""
        return all(
            len(strategy.strategies) == 1
            and all(type(size) is int for size in strategy.tensor_meta.shape)
            for strategy in self.strategies
        )

    def spec(self, index: int, placements: Placements) -> Any:
        """What DTensor would call a tensor with other placements."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        meta = self.strategies[index].tensor_meta
        return DTensorSpec(self.mesh, placements, tensor_meta=meta)

    def fits(self, index: int, placements: Placements) -> bool:
        """Whether a tensor is where it should be, or can be moved there."""
        from torch.distributed.tensor._ops.utils import is_tensor_shardable

        if placements == self.current[index]:
            return True
        key = self._kinds[index], placements
        if key not in self._fits:
            shape = self.strategies[index].tensor_meta.shape
            self._fits[key] = is_tensor_shardable(shape, self.spec(index, placements))
        return self._fits[key]

    def costs(self, index: int, placements: Placements) -> list[Any]:
        """What it costs to move a tensor, from each place where it may be."""
        from torch.distributed.tensor._ops.utils import generate_redistribute_costs

        key = self._kinds[index], placements
        if key not in self._costs:
            spec = self.spec(index, placements)
            self._costs[key] = generate_redistribute_costs(self.strategies[index], spec)
        return self._costs[key]

    def cost(self, combination: Combination, limit: Any = math.inf) -> Any:
        """What all moves cost together; of those that cost more than the limit, some."""
        total: Any = 0
        for index, placements in enumerate(placements_of(combination)):
            total += sum(self.costs(index, placements))
            if total > limit:
                break
        return total

    def sent(self, dim: int, row: Row) -> int:
        """A bit for each tensor of which ranks have parts that others need, or parts of a sum."""
        pairs = zip((placements[dim] for placements in self.current), row.inputs, strict=True)
        return sum(
            1 << index
            for index, (now, then) in enumerate(pairs)
            if now != then and not now.is_replicate()
        )

    @functools.cached_property
    def sending_has_a_cost(self) -> bool:
        """Whether it costs something to send a tensor: not for a rank outside of the mesh."""
        from torch.distributed.tensor import Replicate

        everywhere = (Replicate(),) * self.mesh.ndim
        index = next(i for i, each in enumerate(self.current) if each != everywhere)
        return bool(sum(self.costs(index, everywhere)) > 0)


def _is_static(spec: Any) -> bool:
    meta = spec.tensor_meta
    return all(type(size) is int for size in (*meta.shape, *meta.stride))


def placements_of(combination: Combination) -> list[Placements]:
    """The placements of each input."""
    return list(zip(*(row.inputs for row in combination), strict=True))
