"""The sharding of operators that are derived from another one, by the rule of that.

A form (in-place, or with `out=`) computes the same as the functional operator and copies the
result. So each rank can write its part if the written tensor has the placement of the result.

A companion computes gradients by transposition. A call that runs on shards is a linear map from the
inputs' tangents to those of the results. Its transpose runs on the same shards: a replicated input
has a partial gradient on each rank, and a partial result has a replicated gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchop._compat.dtensor_calls import Call, Input, Row
from torchop._errors import ShardingError
from torchop.extend import OpOverload


class ShardingRule:
    """A registered rule: the placements that it allows for a call.

    Attributes:
        unhashed: the names of arguments that are not in the key of a call.
        cached: what compilers bake into a graph.
    """

    unhashed: tuple[str, ...] = ()
    cached: object

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        """What is allowed on one dimension of a mesh, for the tensors of a call."""
        raise NotImplementedError  # each kind defines its own


class _OfDerived(ShardingRule):
    """The rule of an operator that is derived from another one, `origin`, with a rule."""

    def __init__(self, op: OpOverload, origin: OpOverload, rule: ShardingRule) -> None:
        self.origin = origin
        self.rule = rule
        self.unhashed = rule.unhashed
        self.cached = rule.cached


class _OfInplace(_OfDerived):
    """The placements with which the result is where the first argument is."""

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        inputs = [each._replace(is_written=False) for each in call.inputs]
        rows = self.rule.rows(self.origin, call._replace(inputs=inputs))
        return [row for row in rows if row.results[0] == row.inputs[0]]


class _OfOut(_OfDerived):
    """The placements of the functional operator, and for each output that of its result."""

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        # The outputs come last in the schema, so they are the last inputs.
        inputs = [each for each in call.inputs if not each.is_written]
        names = {argument.name for argument in self.origin._schema.arguments}
        kwargs = {name: value for name, value in call.kwargs.items() if name in names}
        rows = self.rule.rows(self.origin, call._replace(inputs=inputs, kwargs=kwargs))
        return [row._replace(inputs=[*row.inputs, *row.results]) for row in rows]


class _OfTraining(_OfDerived):
    """The rule of `name__training`: that of `name`, and the ambient state that each rank has."""

    def __init__(self, op: OpOverload, origin: OpOverload, rule: ShardingRule) -> None:
        super().__init__(op, origin, rule)
        # The number of a call, which makes it different from all others.
        self._number = op._schema.arguments[-1].name
        self.unhashed = (*rule.unhashed, self._number)

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        from torch.distributed.tensor import Replicate  # for start-up time

        if any("List[" in str(result.real_type) for result in self.origin._schema.returns):
            raise ShardingError(
                f"{self.origin.name()}: a compiled graph calls {op.name()}, which returns a list "
                "of tensors and another tensor, and DTensor does not support that. Write the "
                "formula with register_autograd, or return each tensor as a result."
            )
        kwargs = {n: value for n, value in call.kwargs.items() if n != self._number}
        same = call._replace(kwargs=kwargs, results=call.results[:-1])
        return [
            row._replace(results=[*row.results, Replicate()])
            for row in self.rule.rows(self.origin, same)
        ]


class _OfBackward(_OfDerived):
    """The rule of `name__backward`: the transpose of that of `name`."""

    # Its arguments before those of the operator: gradients, ambient state, and which are needed.
    _LEADING = 3

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        from torch.distributed.tensor import Replicate  # for start-up time

        from torchop._compat.dtensor_strategies import results_of  # for the same reason

        grads, state, needed, *args = call.args
        inputs = [
            Input(each.argument - self._LEADING, each.info, each.is_written)
            for each in call.inputs
            if each.argument >= self._LEADING
        ]
        results = results_of(self.origin, args, call.kwargs, call.mesh)
        rows = self.rule.rows(
            self.origin, Call(tuple(args), call.kwargs, inputs, results, call.mesh)
        )
        some = [] if state is None else [Replicate()]
        transposed = []
        for row in filter(is_transposable, rows):
            of_inputs = zip(gradients_of_inputs(row), needed, strict=True)
            returned = [placement for placement, need in of_inputs if need]
            of_results = zip(gradients_of_results(row.results), grads, strict=True)
            taken = [placement for placement, grad in of_results if grad is not None]
            transposed.append(Row(returned, [*taken, *some, *row.inputs]))
        return transposed


class _OfWithResiduals(_OfDerived):
    """The rule of `name__with_residuals`, which nobody told how the residuals are placed.

    So every rank computes everything, unless a rule is registered for this operator.
    """

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        from torch.distributed.tensor import Replicate  # for start-up time

        count = len(self.origin._schema.returns)
        residuals = [Replicate() for _ in call.results[count:]]
        same = call._replace(results=call.results[:count])
        return [
            row._replace(results=[*row.results, *residuals])
            for row in self.rule.rows(self.origin, same)
            if all(placement.is_replicate() for placement in (*row.results, *row.inputs))
        ]


class _OfBackwardKernel(_OfDerived):
    """The rule of `name__backward_kernel`: every rank computes all, until it has its own rule."""

    def rows(self, op: OpOverload, call: Call) -> list[Row]:
        from torch.distributed.tensor import Replicate  # for start-up time

        return [Row([Replicate() for _ in call.results], [Replicate() for _ in call.inputs])]


# By the kind of the derived operator. An opaque backward has none, because it sees plain tensors.
OF_DERIVED: Mapping[str, type[_OfDerived]] = {
    "inplace": _OfInplace,
    "out": _OfOut,
    "training": _OfTraining,
    "backward": _OfBackward,
    "with_residuals": _OfWithResiduals,
    "backward_kernel": _OfBackwardKernel,
}


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

    def transposed(placement: Any) -> Any:
        if placement.is_replicate():
            return Partial()
        return Replicate() if placement.is_partial() else placement

    return [transposed(placement) for placement in row.inputs]
