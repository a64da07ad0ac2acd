"""The sharding of an operator's companions and gradients, by transposition of its own.

A call that runs on shards is a linear map from the inputs' tangents to those of the results. Its
transpose runs on the same shards: a replicated input has a partial gradient on each rank, and a
partial result has a replicated gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchop._compat.classes import OpOverload
from torchop._compat.dtensor import Call, Input, Row
from torchop._compat.dtensor_strategies import results_of
from torchop._core.definition import Definition
from torchop._errors import ShardingError
from torchop._rules.user.sharding.rule import SHARDING, ShardingRule


def is_transposable(row: Row) -> bool:
    """Whether the gradients of a call with these placements can be computed on each rank.

    A rank does not know which rank had the maximum, or the weight of its part in an average.
    """
    placements = (*row.results, *row.inputs)
    return all(p.reduce_op == "sum" for p in placements if p.is_partial())


def gradients_of_results(placements: Sequence[Any]) -> list[Any]:
    """Where the gradients of results have to be, for the backward to run on shards."""
    from torch.distributed.tensor import Replicate  # for start-up time

    return [Replicate() if placement.is_partial() else placement for placement in placements]


def gradients_of_inputs(row: Row) -> list[Any]:
    """Where the gradients of inputs are that a backward computed on shards."""
    from torch.distributed.tensor import Partial, Replicate  # for start-up time

    if all(placement.is_replicate() for placement in (*row.results, *row.inputs)):
        return list(row.inputs)
    return [
        Partial() if p.is_replicate() else Replicate() if p.is_partial() else p for p in row.inputs
    ]


class OfTraining(ShardingRule):
    """The rule of `name__training`: that of `name`, and the surroundings that each rank has."""

    def __init__(self, definition: Definition, number: str) -> None:
        self._definition = definition
        self._number = number
        self.unhashed = (number,)

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        from torch.distributed.tensor import Replicate  # for start-up time

        _refuse_lists(self._definition, op)
        forward = self._definition.overload
        kwargs = {n: value for n, value in call.kwargs.items() if n != self._number}
        same = call._replace(kwargs=kwargs, results=call.results[:-1])
        return [
            row._replace(results=[*row.results, Replicate()])
            for row in SHARDING.lookup(forward).rows(forward, same)
        ]


class OfBackward(ShardingRule):
    """The rule of `name__backward`: the transpose of that of `name`."""

    # Its arguments before those of the operator: gradients, surroundings, and which are needed.
    _LEADING = 3

    def __init__(self, definition: Definition) -> None:
        self._definition = definition

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        from torch.distributed.tensor import Replicate  # for start-up time

        forward = self._definition.overload
        grads, surroundings, needed, *args = call.args
        inputs = [
            Input(each.argument - self._LEADING, each.info, each.is_written)
            for each in call.inputs
            if each.argument >= self._LEADING
        ]
        results = results_of(forward, args, call.kwargs, call.mesh)
        rows = SHARDING.lookup(forward).rows(
            forward, Call(tuple(args), call.kwargs, inputs, results, call.mesh)
        )
        some = [] if surroundings is None else [Replicate()]
        return [
            Row(
                [p for p, need in zip(gradients_of_inputs(row), needed, strict=True) if need],
                [
                    *[
                        placement
                        for placement, grad in zip(
                            gradients_of_results(row.results), grads, strict=True
                        )
                        if grad is not None
                    ],
                    *some,
                    *row.inputs,
                ],
            )
            for row in rows
            if is_transposable(row)
        ]


def register_companions(
    definition: Definition, training: Definition, number: str, backward: Definition
) -> None:
    """Gives the companions of a derived formula their rules, which follow that of the operator."""
    SHARDING.register(training.overload, OfTraining(definition, number))
    SHARDING.register(backward.overload, OfBackward(definition))


def _refuse_lists(definition: Definition, op: OpOverload) -> None:
    if any("List[" in kind for kind in definition.schema.returns):
        raise ShardingError(
            f"{definition}: a compiled graph calls {op.name()}, which returns a list of tensors "
            "and another tensor, and DTensor does not support that. Write the formula with "
            "register_autograd, or return each tensor as a result."
        )
