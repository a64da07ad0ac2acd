"""The input tensors of a call on DTensors, and the cost of redistributing them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from torchop._compat.dtensor_calls import Row

# The placements of one tensor, one for each mesh dimension.
Placements: TypeAlias = tuple[Any, ...]
# The placements of all tensors in a call: one `Row` per mesh dimension, with the placement of every
# tensor on that dimension.
Combination: TypeAlias = tuple[Row, ...]


class Inputs:
    """The input tensors of a call, with cached redistribution costs.

    `strategies` contains DTensor's OpStrategy for each tensor, which lists the tensor's possible
    placements. `current` contains the placements that the tensors have before the call.
    """

    def __init__(self, strategies: Sequence[Any], mesh: Any) -> None:
        self.strategies = strategies
        self.mesh = mesh
        specs = [strategy.strategies[0].output_spec for strategy in strategies]
        self.current: list[Placements] = [spec.placements for spec in specs]
        # Give equal specs the same number, so that costs are computed once per number. This pays
        # off because the tensors of a call often have the same shape and placements.
        kinds: dict[Any, int] = {}
        self._kinds = [
            # A spec with symbolic sizes is not hashable, so it cannot share a number with other
            # specs.
            kinds.setdefault(spec, index) if _is_static(spec) else index
            for index, spec in enumerate(specs)
        ]
        self._costs: dict[tuple[int, Placements], list[Any]] = {}
        self._fits: dict[tuple[int, Placements], bool] = {}

    @property
    def are_certain(self) -> bool:
        """Whether all tensors have static shapes and exactly one possible placement each."""
        return all(
            len(strategy.strategies) == 1
            and all(type(size) is int for size in strategy.tensor_meta.shape)
            for strategy in self.strategies
        )

    def spec(self, index: int, placements: Placements) -> Any:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        meta = self.strategies[index].tensor_meta
        return DTensorSpec(self.mesh, placements, tensor_meta=meta)

    def fits(self, index: int, placements: Placements) -> bool:
        from torch.distributed.tensor._ops.utils import is_tensor_shardable

        if placements == self.current[index]:
            return True
        key = self._kinds[index], placements
        if key not in self._fits:
            shape = self.strategies[index].tensor_meta.shape
            self._fits[key] = is_tensor_shardable(shape, self.spec(index, placements))
        return self._fits[key]

    def costs(self, index: int, placements: Placements) -> list[Any]:
        """Return the costs of moving a tensor to `placements` from its possible placements."""
        from torch.distributed.tensor._ops.utils import generate_redistribute_costs

        key = self._kinds[index], placements
        if key not in self._costs:
            spec = self.spec(index, placements)
            self._costs[key] = generate_redistribute_costs(self.strategies[index], spec)
        return self._costs[key]

    def cost(self, combination: Combination, limit: Any = math.inf) -> Any:
        """Return the inputs' total redistribution cost, stopping early once it exceeds `limit`."""
        total: Any = 0
        for index, placements in enumerate(placements_of(combination)):
            total += sum(self.costs(index, placements))
            if total > limit:
                break
        return total

    def redistributed(self, dim: int, row: Row) -> int:
        """Return a bit mask of the inputs that `row` would redistribute on mesh dimension `dim`.

        Inputs that are currently replicated do not count, because redistributing them needs no
        communication.
        """
        pairs = zip((placements[dim] for placements in self.current), row.inputs, strict=True)
        return sum(
            1 << index
            for index, (now, then) in enumerate(pairs)
            if now != then and not now.is_replicate()
        )

    @functools.cached_property
    def communication_has_cost(self) -> bool:
        """Whether costs can exceed 0. For ranks outside of the mesh, DTensor returns 0."""
        from torch.distributed.tensor import Replicate

        everywhere = (Replicate(),) * self.mesh.ndim
        index = next(i for i, each in enumerate(self.current) if each != everywhere)
        return bool(sum(self.costs(index, everywhere)) > 0)


def _is_static(spec: Any) -> bool:
    meta = spec.tensor_meta
    return all(type(size) is int for size in (*meta.shape, *meta.stride))


def placements_of(combination: Combination) -> list[Placements]:
    """Return each input's placements, one for each mesh dimension."""
    return list(zip(*(row.inputs for row in combination), strict=True))
