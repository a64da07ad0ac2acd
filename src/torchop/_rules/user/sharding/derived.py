"""The sharding of operators that are derived from another one, by the rule of that.

A form (in-place, or with `out=`) computes the same as the functional operator and copies the
result. So each rank can write its part if the written tensor has the placement of the result.

A companion computes gradients by transposition. A call that runs on shards is a linear map from the
inputs' tangents to those of the results. Its transpose runs on the same shards: a replicated input
has a partial gradient on each rank, and a partial result has a replicated gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torchop._compat.dtensor_calls import Call, Input, Row
from torchop._errors import ShardingError
from torchop.extend import OpOverload

# What is allowed on one dimension of a mesh, for the tensors of a call.
Rows: TypeAlias = Callable[[OpOverload, Call], list[Row]]


class ShardingRule(NamedTuple):
    """A registered rule: the placements that it allows for a call."""

    rows: Rows
    cached: object  # what compilers bake into a graph
    unhashed: tuple[str, ...] = ()  # the names of arguments that are not in the key of a call
    like: OpOverload | None = None  # the ATen operator whose rule of DTensor decides


def rule_of_derived(
    op: OpOverload, kind: str, origin: OpOverload, rule: ShardingRule
) -> ShardingRule | None:
    """The rule of an operator that is derived from another one; None if it has none by that."""
    rows = _OF_DERIVED.get(kind)
    if rows is None:
        return None
    more = (_number_of(op),) if kind == "training" else ()
    of_origin = functools.partial(rule.rows, origin)
    return ShardingRule(
        functools.partial(rows, origin, of_origin), rule.cached, (*rule.unhashed, *more)
    )


_RowsOfOrigin: TypeAlias = Callable[[Call], list[Row]]


def _inplace(origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call) -> list[Row]:
    """The placements with which the result is where the first argument is."""
    inputs = [each._replace(is_written=False) for each in call.inputs]
    rows = rows_of(call._replace(inputs=inputs))
    return [row for row in rows if row.results[0] == row.inputs[0]]


def _out(origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call) -> list[Row]:
    """The placements of the functional operator, and for each output that of its result."""
    # The outputs come last in the schema, so they are the last inputs.
    inputs = [each for each in call.inputs if not each.is_written]
    names = {argument.name for argument in origin._schema.arguments}
    kwargs = {name: value for name, value in call.kwargs.items() if name in names}
    rows = rows_of(call._replace(inputs=inputs, kwargs=kwargs))
    return [row._replace(inputs=[*row.inputs, *row.results]) for row in rows]


def _number_of(op: OpOverload) -> str:
    """The argument that is the number of a call, which makes it different from all others."""
    return op._schema.arguments[-1].name


def _training(origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call) -> list[Row]:
    """For `name__training`, those of `name`, and the ambient state that each rank has."""
    if any("List[" in str(result.real_type) for result in origin._schema.returns):
        raise ShardingError(
            f"{origin.name()}: a compiled graph calls {op.name()}, which returns a list of tensors "
            "and another tensor, and DTensor does not support that. Write the formula with "
            "register_autograd, or return each tensor as a result."
        )
    kwargs = {n: value for n, value in call.kwargs.items() if n != _number_of(op)}
    rows = rows_of(call._replace(kwargs=kwargs, results=call.results[:-1]))
    return [row._replace(results=[*row.results, *_replicated(1)]) for row in rows]


# The arguments of `name__backward` before those of the operator: gradients, ambient state, and
# which gradients are needed.
_LEADING = 3


def _backward(origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call) -> list[Row]:
    """For `name__backward`, the transposes of those of `name`."""
    from torchop._compat.dtensor_strategies import results_of  # for start-up time

    grads, state, needed, *args = call.args
    inputs = [
        Input(each.argument - _LEADING, each.info, each.is_written)
        for each in call.inputs
        if each.argument >= _LEADING
    ]
    results = results_of(origin, args, call.kwargs, call.mesh)
    rows = rows_of(Call(tuple(args), call.kwargs, inputs, results, call.mesh))
    some = _replicated(0 if state is None else 1)
    transposed = []
    for row in filter(is_transposable, rows):
        of_inputs = zip(gradients_of_inputs(row), needed, strict=True)
        returned = [placement for placement, need in of_inputs if need]
        of_results = zip(gradients_of_results(row.results), grads, strict=True)
        taken = [placement for placement, grad in of_results if grad is not None]
        transposed.append(Row(returned, [*taken, *some, *row.inputs]))
    return transposed


def _with_residuals(
    origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call
) -> list[Row]:
    """For `name__with_residuals`, those of `name`, whose rule has operands of the residuals."""
    return rows_of(call)


def _backward_kernel(
    origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call
) -> list[Row]:
    """For `name__backward_kernel`, the transposes of those of the call that it is the backward of.

    A kernel that does not take all arguments of that call does not tell how it was made. So every
    rank computes everything then, unless a rule is registered for this operator.
    """
    forward = _forward_of(origin, op, call)
    if forward is None:
        return [Row(_replicated(len(call.results)), _replicated(len(call.inputs)))]
    taken = dict.fromkeys(op._schema.arguments[each.argument].name for each in call.inputs)
    transposed = []
    for row in filter(is_transposable, rows_of(forward)):
        placed = _placed_by_name(origin, op, forward, row)
        inputs = [placement for name in taken for placement in placed[name]]
        transposed.append(Row(gradients_of_inputs(row), inputs))
    return transposed


def _forward_of(origin: OpOverload, op: OpOverload, call: Call) -> Call | None:
    """The call of `origin` whose gradients a call of its backward kernel computes, if it tells."""
    from torchop._compat.dtensor_strategies import results_of  # for start-up time

    names = [argument.name for argument in op._schema.arguments]
    values = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    arguments = origin._schema.arguments
    if any(argument.name not in values for argument in arguments):
        return None
    args = tuple(values[argument.name] for argument in arguments if not argument.kwarg_only)
    kwargs = {argument.name: values[argument.name] for argument in arguments if argument.kwarg_only}
    inputs = [
        Input(index, each.info, is_written=False)
        for index, argument in enumerate(arguments)
        for each in call.inputs
        if names[each.argument] == argument.name
    ]
    results = results_of(origin, args, kwargs, call.mesh)
    is_known = len(inputs) == len(call.results) and len(results) == len(origin._schema.returns)
    return Call(args, kwargs, inputs, results, call.mesh) if is_known else None


def _placed_by_name(
    origin: OpOverload, op: OpOverload, forward: Call, row: Row
) -> Mapping[str, list[Any]]:
    """Where the tensors are that a backward kernel takes, by the names of its parameters."""
    returns = origin._schema.returns
    # Residuals are the results that have a name. The kernel begins with gradients of the others.
    count = sum(not result.name for result in returns)
    outputs = [f"output_{index}" for index in range(count)] if count > 1 else ["output"]
    names = [*outputs, *(result.name for result in returns[count:])]
    placed = {name: [each] for name, each in zip(names, row.results, strict=True)}
    for index, argument in enumerate(origin._schema.arguments):
        pairs = zip(forward.inputs, row.inputs, strict=True)
        placed[argument.name] = [each for of, each in pairs if of.argument == index]
    grads = gradients_of_results(row.results[:count])
    gradients = (argument.name for argument in op._schema.arguments)
    return placed | {name: [grad] for name, grad in zip(gradients, grads, strict=False)}


# By the kind of the derived operator.
_OF_DERIVED: Mapping[str, Callable[..., list[Row]]] = {
    "inplace": _inplace,
    "out": _out,
    "training": _training,
    "backward": _backward,
    "with_residuals": _with_residuals,
    "backward_kernel": _backward_kernel,
}


def _replicated(count: int) -> list[Any]:
    """The placements of tensors of which each rank has all."""
    from torch.distributed.tensor import Replicate  # for start-up time

    return [Replicate() for _ in range(count)]


def _is_replicated(row: Row) -> bool:
    return all(placement.is_replicate() for placement in (*row.results, *row.inputs))


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

    if _is_replicated(row):
        return list(row.inputs)

    def transposed(placement: Any) -> Any:
        if placement.is_replicate():
            return Partial()
        return Replicate() if placement.is_partial() else placement

    return [transposed(placement) for placement in row.inputs]
