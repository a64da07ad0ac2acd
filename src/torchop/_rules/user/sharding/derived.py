"""Compute the sharding rules of operators that torchop derives from another operator.

Derived operators are the in-place and out= forms of an operator, and the helper operators that
replace it in compiled graphs, for example `name__backward`. In this package, a *row* is one way to
shard a call: it lists the placements of all tensors of the call on one dimension of the device
mesh.

An in-place or out= form copies the result of the functional operator into a tensor. This tensor
must have the same placement as the result, so that each rank can write to its own shard.

The helper operators for the backward pass use transposed rows. Each rank differentiates the forward
call on its own shards, so a gradient is usually sharded like the tensor that it belongs to. There
are two exceptions. A replicated input affects the results of every rank, so its gradient is a sum
over the ranks, i.e. Partial. A Partial result is already a sum over the ranks, so every rank needs
the whole gradient, i.e. the gradient is replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torchop._compat.dtensor_calls import Call, Input, Row
from torchop._errors import ShardingError
from torchop.extend import OpOverload

Rows: TypeAlias = Callable[[OpOverload, Call], list[Row]]


class ShardingRule(NamedTuple):
    """A registered sharding rule.

    `rows` returns the rows (ways to shard a call) that the rule allows, and `cached` becomes a part
    of the cache keys of compiled graphs. DTensor's cache ignores the arguments named in `unhashed`.
    `like` is the ATen operator whose DTensor rule is reused, if any.
    """

    rows: Rows
    cached: object
    unhashed: tuple[str, ...] = ()
    like: OpOverload | None = None


def rule_of_derived(
    op: OpOverload, kind: str, origin: OpOverload, rule: ShardingRule
) -> ShardingRule | None:
    """Return the sharding rule of a derived operator, or None if torchop cannot compute it."""
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
    """Return the rows (ways to shard a call) that place the result like the first argument.

    An in-place operator returns its first argument, so the result must have the same placement.
    """
    inputs = [each._replace(is_written=False) for each in call.inputs]
    rows = rows_of(call._replace(inputs=inputs))
    return [row for row in rows if row.results[0] == row.inputs[0]]


def _out(origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call) -> list[Row]:
    """Return the functional operator's rows (ways to shard a call), with the outputs' placements.

    Each output has the same placement as the result that is copied into it.
    """
    inputs = [each for each in call.inputs if not each.is_written]
    names = {argument.name for argument in origin._schema.arguments}
    kwargs = {name: value for name, value in call.kwargs.items() if name in names}
    rows = rows_of(call._replace(inputs=inputs, kwargs=kwargs))
    return [row._replace(inputs=[*row.inputs, *row.results]) for row in rows]


def _number_of(op: OpOverload) -> str:
    """Return the name of `name__training`'s argument that keeps compilers from merging calls."""
    return op._schema.arguments[-1].name


def _training(origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call) -> list[Row]:
    """Return the rows (ways to shard a call) of `name`, with the additional result replicated.

    The additional result of `name__training` contains the state of the forward pass, such as the
    states of random number generators.
    """
    if any("List[" in str(result.real_type) for result in origin._schema.returns):
        raise ShardingError(
            f"{origin.name()}: a compiled graph calls {op.name()}, but DTensor does not support "
            "operators that return a list of tensors and another tensor. Write the formula with "
            "register_autograd, or return each tensor as a result."
        )
    kwargs = {n: value for n, value in call.kwargs.items() if n != _number_of(op)}
    rows = rows_of(call._replace(kwargs=kwargs, results=call.results[:-1]))
    return [row._replace(results=[*row.results, *_replicated(1)]) for row in rows]


# `name__backward` takes three arguments before the arguments of `name`: the gradients, the saved
# generator states and settings, and the mask of needed gradients.
_LEADING = 3


def _backward(origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call) -> list[Row]:
    """Return the rows (ways to shard a call) of `name__backward`: the transposed rows of `name`.

    The docstring of the module explains how rows are transposed.
    """
    from torchop._compat.dtensor_strategies import results_of  # slow import

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
    """Return the rows (ways to shard a call). `rows_of` already handles the residuals."""
    return rows_of(call)


def _backward_kernel(
    origin: OpOverload, rows_of: _RowsOfOrigin, op: OpOverload, call: Call
) -> list[Row]:
    """Transpose the forward call's rows (ways to shard it) to get the rows of the backward kernel.

    If the backward kernel does not take all arguments of the forward call, the forward call cannot
    be reconstructed. In this case, fall back to replicating all tensors, so that every rank
    computes everything.
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
    """Reconstruct the forward call from the arguments of a backward kernel, if possible."""
    from torchop._compat.dtensor_strategies import results_of  # slow import

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
    """Map each parameter of a backward kernel to the placements of the tensors passed for it."""
    returns = origin._schema.returns
    # In the schema, only residuals (kernel outputs for the backward pass) have names, so the
    # results without a name are the outputs. The first parameters of the backward kernel are the
    # gradients of the outputs.
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


_OF_DERIVED: Mapping[str, Callable[..., list[Row]]] = {
    "inplace": _inplace,
    "out": _out,
    "training": _training,
    "backward": _backward,
    "with_residuals": _with_residuals,
    "backward_kernel": _backward_kernel,
}


def _replicated(count: int) -> list[Any]:
    from torch.distributed.tensor import Replicate  # slow import

    return [Replicate() for _ in range(count)]


def _is_replicated(row: Row) -> bool:
    return all(placement.is_replicate() for placement in (*row.results, *row.inputs))


def is_transposable(row: Row) -> bool:
    """Return whether each rank can compute the gradients of a call with these placements.

    This requires that all Partial tensors are sums. With other reductions, a rank lacks
    information, for example which rank had the maximum.
    """
    placements = (*row.results, *row.inputs)
    return all(p.reduce_op == "sum" for p in placements if p.is_partial())


def gradients_of_results(placements: Sequence[Any]) -> list[Any]:
    """Return the placements of the gradients that the backward pass receives for the results."""
    from torch.distributed.tensor import Replicate  # slow import

    return [Replicate() if placement.is_partial() else placement for placement in placements]


def gradients_of_inputs(row: Row) -> list[Any]:
    """Return the placements of the gradients that each rank computes for the inputs."""
    from torch.distributed.tensor import Partial, Replicate  # slow import

    if _is_replicated(row):
        return list(row.inputs)

    def transposed(placement: Any) -> Any:
        if placement.is_replicate():
            return Partial()
        return Replicate() if placement.is_partial() else placement

    return [transposed(placement) for placement in row.inputs]
