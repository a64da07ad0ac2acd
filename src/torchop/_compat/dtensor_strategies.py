"""Translate sharding rules into DTensor's strategies.

A sharding rule returns the combinations of placements that are valid on one mesh dimension, as
`Row` objects. A strategy (DTensor's OpSpec) lists the placements of a call's inputs and results on
all mesh dimensions, with the cost of redistributing the inputs. DTensor chooses the cheapest
strategy.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import math
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchop._compat.classes import OpOverload, tree_leaves
from torchop._compat.dtensor import propagator
from torchop._compat.dtensor_calls import Call, Input, Row, Rows, TensorInfo, is_written
from torchop._compat.dtensor_moves import Combination, Inputs, placements_of
from torchop._errors import ShardingError, short_repr


class Redistributable(enum.Enum):
    ARGUMENTS = "positional"
    KEYWORDS = "positional and keyword"
    ALL = "all, for error messages"


def op_specs(
    op: OpOverload, rows: Rows, op_schema: Any, redistributable: Redistributable
) -> list[Any]:
    return _specs(op, *_analyze(op, rows, op_schema), redistributable)


def decisive_specs(op: OpOverload, rows: Rows, op_schema: Any) -> list[Any]:
    """Return only the strategies that DTensor could choose for a call, usually just one.

    DTensor prefers a strategy that redistributes nothing. Otherwise it picks the cheapest strategy,
    or the first one in case of a tie. This function finds that strategy without computing the costs
    of all strategies, which would take longer than the rest of DTensor's decision.
    """
    call, inputs, allowed = _analyze(op, rows, op_schema)
    if not inputs.are_certain:
        return _specs(op, call, inputs, allowed, Redistributable.ARGUMENTS)
    found = _decisive(call, inputs, _choices(call, inputs, allowed, Redistributable.ARGUMENTS))
    if not found:
        raise _immovable(op, call, inputs, allowed)
    return [_op_spec(op, call, inputs, combination) for combination in found]


def _decisive(call: Call, inputs: Inputs, choices: Sequence[Sequence[Row]]) -> list[Combination]:
    """Return the combinations of rows that DTensor could choose for a call, one row per dimension.

    `choices` lists, for each mesh dimension, the rows (placements of all tensors) to choose from.
    Return [] if no combination is possible.
    """
    combinations = list(itertools.product(*choices))
    masks = [[inputs.redistributed(dim, row) for row in rows] for dim, rows in enumerate(choices)]
    counts = [
        functools.reduce(operator.or_, each).bit_count() for each in itertools.product(*masks)
    ]
    found = [
        each
        for each, count in zip(combinations, counts, strict=True)
        if count == 0
        and placements_of(each) == inputs.current
        and _is_possible(call, inputs, each)
        and inputs.cost(each) == 0
    ]
    if found:
        return found  # if there are several, DTensor chooses the last one
    best, least = -1, math.inf
    # Try the combinations that need no communication first, because a cost of 0 ends the search.
    for index in sorted(range(len(combinations)), key=counts.__getitem__):
        if least == 0 and counts[index] and inputs.communication_has_cost:
            break
        if not _is_possible(call, inputs, combinations[index]):
            continue
        cost = inputs.cost(combinations[index], least)
        if best < 0 or cost < least or (cost == least and index < best):
            best, least = index, cost
    return [] if best < 0 else [combinations[best]]


def cost(spec: Any) -> Any:
    return sum(map(sum, spec.redistribute_cost))


def cheapest(specs: Sequence[Any], op_schema: Any) -> Any:
    """Return the cheapest strategy. Break ties by the number of inputs to redistribute."""
    current = [spec.placements for spec in (*op_schema.args_spec, *_keywords(op_schema))]

    def order(spec: Any) -> tuple[Any, int]:
        wanted = [each.placements for each in spec.input_specs]
        return cost(spec), sum(a != b for a, b in zip(current, wanted, strict=True))

    return min(specs, key=order)


def _keywords(op_schema: Any) -> list[Any]:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return [v for v in op_schema.kwargs_schema.values() if isinstance(v, DTensorSpec)]


def _analyze(op: OpOverload, rows: Rows, op_schema: Any) -> tuple[Call, Inputs, Sequence[Row]]:
    call, strategies = call_of(op, op_schema)
    return call, Inputs(strategies, call.mesh), rows(call)


def _specs(
    op: OpOverload,
    call: Call,
    inputs: Inputs,
    rows: Sequence[Row],
    redistributable: Redistributable,
) -> list[Any]:
    specs = [
        _op_spec(op, call, inputs, combination)
        for combination in itertools.product(*_choices(call, inputs, rows, redistributable))
        if _is_possible(call, inputs, combination)
    ]
    if not specs:
        raise _immovable(op, call, inputs, rows)
    return specs


def call_of(op: OpOverload, op_schema: Any) -> tuple[Call, list[Any]]:
    strategies: list[Any] = []
    inputs: list[Input] = []

    def info_of(index: int, value: Any) -> Any:
        if isinstance(value, OpStrategy):
            info = TensorInfo(*value.tensor_meta)
            strategies.append(value)
            inputs.append(Input(index, info, is_written(arguments[index])))
            return info
        if isinstance(value, TupleStrategy):
            value = value.children
        if isinstance(value, (list, tuple)) and any(isinstance(v, OpStrategy) for v in value):
            return [info_of(index, item) for item in value]
        return value

    from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy

    arguments = op._schema.arguments
    args = tuple(info_of(index, value) for index, value in enumerate(op_schema.args_schema))
    names = [argument.name for argument in arguments]
    kwargs = {
        name: info_of(names.index(name), op_schema.kwargs_schema[name])
        for name in sorted(op_schema.kwargs_schema, key=names.index)
    }
    results = _results(with_specs(op_schema))
    mesh = _mesh(op, strategies)
    return Call(args, kwargs, inputs, list(_infos(results)), mesh), strategies


class _LastCall(threading.local):
    """The latest call for which DTensor ran the fake kernel in this thread, with its results."""

    op_schema: Any = None
    results: Any = None
    assumed: tuple[Any, Any] | None = None  # the arguments of `assumed_results`


_last = _LastCall()


@contextlib.contextmanager
def assumed_results(op_schema: Any, results: Any) -> Iterator[None]:
    """Make DTensor use `results` as the results of a call, instead of running the fake kernel."""
    before, _last.assumed = _last.assumed, (op_schema, results)
    try:
        yield
    finally:
        _last.assumed = before


def remember_results() -> None:
    """Make DTensor's method that runs fake kernels also store the results of the last call.

    DTensor runs the fake kernel before it calls the strategy, but does not pass the results on.
    Running the fake kernel a second time in the strategy would take longer than choosing the
    placements.
    """
    engine = propagator()
    propagate = engine._propagate_tensor_meta_non_cached

    def propagate_and_remember(op_schema: Any) -> Any:
        assumed = _last.assumed
        if assumed is not None and assumed[0] is op_schema:
            results = assumed[1]
        else:
            results = propagate(op_schema)
        _last.op_schema, _last.results = op_schema, results
        return results

    engine._propagate_tensor_meta_non_cached = propagate_and_remember


def _results(op_schema: Any) -> Any:
    last, results = _last.op_schema, _last.results
    _last.op_schema = _last.results = None
    if last is not None and last.op is op_schema.op and _are_same(last, op_schema):
        return results
    return propagator()._propagate_tensor_meta_non_cached(op_schema)


def _are_same(left: Any, right: Any) -> bool:
    """Return whether two calls have identical arguments: the same objects, not just equal ones."""
    pairs = [tree_leaves((schema.args_schema, schema.kwargs_schema)) for schema in (left, right)]
    return len(pairs[0]) == len(pairs[1]) and all(map(operator.is_, *pairs))


def results_of(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Any
) -> list[TensorInfo]:
    """Run an operator's fake kernel on arguments with a `TensorInfo` in place of each tensor."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema

    def spec(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=value.meta)
        return list(map(spec, value)) if isinstance(value, (list, tuple)) else value

    schema = OpSchema(op, tuple(map(spec, args)), {n: spec(v) for n, v in kwargs.items()})
    return list(_infos(propagator()._propagate_tensor_meta_non_cached(schema)))


def with_specs(op_schema: Any) -> Any:
    """Return a copy of an OpSchema with the current spec of each tensor.

    In the OpSchema that DTensor passes, each tensor is represented by an OpStrategy instead.
    """
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy

    def spec(value: Any) -> Any:
        if isinstance(value, OpStrategy):
            return value.strategies[0].output_spec
        if isinstance(value, TupleStrategy):
            return [spec(child) for child in value.children]
        return type(value)(map(spec, value)) if isinstance(value, (list, tuple)) else value

    return OpSchema(
        op_schema.op,
        tuple(map(spec, op_schema.args_schema)),
        {name: spec(value) for name, value in op_schema.kwargs_schema.items()},
    )


def _infos(results: Any) -> Iterator[TensorInfo]:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    if isinstance(results, TensorMeta):
        yield TensorInfo(*results)
    elif isinstance(results, (list, tuple)):
        for result in results:
            yield from _infos(result)


def _mesh(op: OpOverload, strategies: Sequence[Any]) -> Any:
    mesh = strategies[0].mesh
    for strategy in strategies:
        if strategy.mesh != mesh:
            raise ShardingError(
                f"{op.name()}: all tensors of a call must be on one device mesh, got {mesh} and "
                f"{strategy.mesh}. Distribute one of them on the mesh of the other."
            )
    return mesh


def _choices(
    call: Call, inputs: Inputs, rows: Sequence[Row], redistributable: Redistributable
) -> list[list[Row]]:
    """Return the rows (placements of all tensors) that a strategy may use on each mesh dimension.

    A row is left out if it would redistribute a tensor with fixed placements. Tensors that the
    operator writes to are fixed, because a write to a redistributed copy would not change the
    caller's tensor. Keyword-only tensors are fixed unless `redistributable` includes keywords,
    because DTensor redistributes only positional arguments (pytorch/pytorch#167977).
    """
    positional = sum(each.argument < len(call.args) for each in call.inputs)
    fixed = [
        index
        for index, each in enumerate(call.inputs)
        if (each.is_written and redistributable is not Redistributable.ALL)
        or (index >= positional and redistributable is Redistributable.ARGUMENTS)
    ]
    current = inputs.current
    return [
        [
            row
            for row in _with_strides(rows, [placements[dim] for placements in current])
            if all(row.inputs[index] == current[index][dim] for index in fixed)
        ]
        for dim in range(inputs.mesh.ndim)
    ]


def _with_strides(rows: Sequence[Row], current: Sequence[Any]) -> Iterator[Row]:
    """Yield each row of placements unchanged, and then with `_StridedShard` in place of `Shard`.

    `current` contains the current placements of the inputs. The rows with `_StridedShard` are
    yielded for each split factor in `current`, so that strided shards among the inputs need not be
    redistributed.
    """
    yield from rows
    factors = {p.split_factor for p in current if type(p).__name__ == "_StridedShard"}
    for factor, row in itertools.product(sorted(factors), rows):
        if any(placement.is_shard() for placement in row.inputs):
            yield Row(
                [_strided(p, factor) for p in row.results],
                [_strided(p, factor) for p in row.inputs],
                row.reduction,
            )


def _strided(placement: Any, factor: int) -> Any:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(placement.dim, split_factor=factor) if placement.is_shard() else placement


def _is_possible(call: Call, inputs: Inputs, combination: Combination) -> bool:
    for index in range(len(call.results)):
        if not _may_be_partial([row.results[index] for row in combination]):
            return False
    for index, placements in enumerate(placements_of(combination)):
        if not _may_be_partial(placements) or not inputs.fits(index, placements):
            return False
        meta = inputs.strategies[index].tensor_meta
        for row, placement in zip(combination, placements, strict=True):
            is_part = row.reduction is not None and _is_shard(placement)
            if is_part and not _is_reducible(meta, inputs.mesh, placements, placement, row):
                return False
    return True


def _may_be_partial(placements: Sequence[Any]) -> bool:
    """Return whether all Partial placements have the same reduction.

    Different reductions cannot be combined: a maximum of sums, for example, is not a sum of maxima.
    """
    return len({p.reduce_op for p in placements if p.is_partial()}) <= 1


def _is_shard(placement: Any) -> bool:
    # Do not use `isinstance`, because _StridedShard is not a subclass of Shard.
    return hasattr(placement, "dim")


def _is_reducible(meta: Any, mesh: Any, placements: Sequence[Any], shard: Any, row: Row) -> bool:
    """Return whether the ranks' partial results for these shards can be combined.

    A sum works for any shards. An average requires shards of equal size, and any other reduction,
    such as a maximum, requires that no shard is empty.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    parts = 1
    for index, placement in enumerate(placements):
        if _is_shard(placement) and placement.dim == shard.dim:
            parts *= mesh.size(index)
    size = meta.shape[shard.dim]
    if row.reduction == "sum":
        return True
    if row.reduction == "avg":
        return bool(guard_or_false(size % parts == 0))
    largest = (size + parts - 1) // parts
    return bool(guard_or_false(largest * (parts - 1) < size))


def _op_spec(op: OpOverload, call: Call, inputs: Inputs, combination: Combination) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec

    outputs = [
        DTensorSpec(
            inputs.mesh,
            tuple(row.results[index] for row in combination),
            tensor_meta=info.meta,
        )
        for index, info in enumerate(call.results)
    ]
    wanted = list(enumerate(placements_of(combination)))
    returns = op._schema.returns
    is_single = len(returns) == 1 and str(returns[0].real_type) == "Tensor"
    return OpSpec(
        output_specs=None if not outputs else outputs[0] if is_single else tuple(outputs),
        input_specs=[inputs.spec(index, placements) for index, placements in wanted],
        redistribute_cost=[inputs.costs(index, placements) for index, placements in wanted],
    )


def _immovable(op: OpOverload, call: Call, inputs: Inputs, rows: Sequence[Row]) -> ShardingError:
    """Return the error for a mutated argument whose placements violate the sharding rule."""
    best = min(_specs(op, call, inputs, rows, Redistributable.ALL), key=cost)
    for index, each in enumerate(call.inputs):
        wanted, current = best.input_specs[index].placements, inputs.current[index]
        if each.is_written and wanted != current:
            why = "The sharding rule does not accept these placements"
            return written_elsewhere(op, each.argument, current, wanted, why)
    raise AssertionError("the rule accepts all placements of the written arguments")


def written_elsewhere(
    op: OpOverload, argument: int, current: Sequence[Any], wanted: Sequence[Any], why: str
) -> ShardingError:
    name = op._schema.arguments[argument].name
    return ShardingError(
        f"{op.name()}: the operator writes into {name!r}, whose placements are "
        f"{short_repr(list(current))}. {why}, and DTensor cannot redistribute an argument that is "
        "written, because the caller's tensor would not change. Redistribute it before the call: "
        f"{name} = {name}.redistribute(placements={short_repr(list(wanted))})."
    )
