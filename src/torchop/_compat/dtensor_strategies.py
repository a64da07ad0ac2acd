"""DTensor's strategies: the placements of its tensors that an operator accepts for a call."""

from __future__ import annotations

import enum
import itertools
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchop._compat.classes import OpOverload, tree_leaves
from torchop._compat.dtensor import Call, Input, Row, Rows, TensorInfo, is_written
from torchop._errors import ShardingError, short_repr


class Moving(enum.Enum):
    """Which tensors of a call a strategy may move."""

    ARGUMENTS = "positional"
    KEYWORDS = "those by keyword too"
    ALL = "what is written too, to say where it should be"


def op_specs(op: OpOverload, rows: Rows, op_schema: Any, moving: Moving) -> list[Any]:
    """All placements that a rule accepts for a call, each with its cost.

    Raises:
        ShardingError: it accepts none, or the call is on several meshes.
    """
    call, strategies = _call(op, op_schema)
    allowed, mesh = rows(call), call.mesh
    specs = [
        _op_spec(op, call, strategies, mesh, combination)
        for combination in _combinations(call, strategies, mesh, allowed, moving)
    ]
    if not specs:
        raise _immovable(op, call, strategies, mesh, allowed)
    return specs


def cost(spec: Any) -> Any:
    """What it costs to move the inputs of a call to the placements that are accepted."""
    return sum(map(sum, spec.redistribute_cost))


def rows_of(spec: Any) -> list[Row]:
    """The placements of a strategy, by the dimension of the mesh."""
    results = results_of_spec(spec)
    return [
        Row([r.placements[dim] for r in results], [i.placements[dim] for i in spec.input_specs])
        for dim in range(spec.mesh.ndim)
    ]


def results_of_spec(spec: Any) -> list[Any]:
    """The specs of all results that are tensors."""
    outputs = spec.output_specs
    return [] if outputs is None else list(outputs) if isinstance(outputs, tuple) else [outputs]


def cheapest(specs: Sequence[Any], op_schema: Any) -> Any:
    """The placements to which the inputs are moved at the least cost, if possible none of them."""
    current = [spec.placements for spec in (*op_schema.args_spec, *_keywords(op_schema))]

    def order(spec: Any) -> tuple[Any, int]:
        wanted = [each.placements for each in spec.input_specs]
        return cost(spec), sum(a != b for a, b in zip(current, wanted, strict=True))

    return min(specs, key=order)


def _keywords(op_schema: Any) -> list[Any]:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return [v for v in op_schema.kwargs_schema.values() if isinstance(v, DTensorSpec)]


def propagator() -> Any:
    """What decides where the tensors of a call have to be, one for the process."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


def _call(op: OpOverload, op_schema: Any) -> tuple[Call, list[Any]]:
    """The call that DTensor asks about, and its strategy for each tensor in it."""
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
    results = _results(_with_specs(op_schema))
    mesh = _mesh(op, strategies)
    return Call(args, kwargs, inputs, list(_infos(results)), mesh), strategies


class _Last(threading.local):
    """The last question of DTensor to a fake kernel, and the answer."""

    op_schema: Any = None
    results: Any = None


_last = _Last()


def remember_results() -> None:
    """Remembers the results that DTensor works out before it asks for a strategy.

    It keeps them to itself, and fake kernels are most of what deciding costs.
    """
    engine = propagator()
    name = "_propagate_tensor_meta_non_cached"
    ask = getattr(engine, name)
    if getattr(ask, "__module__", None) == __name__:
        return

    def ask_and_remember(op_schema: Any) -> Any:
        results = ask(op_schema)
        _last.op_schema, _last.results = op_schema, results
        return results

    setattr(engine, name, ask_and_remember)


def _results(op_schema: Any) -> Any:
    """The results of the operator: the last answer, if it was for the same objects."""
    last, results = _last.op_schema, _last.results
    _last.op_schema = _last.results = None
    if last is not None and last.op is op_schema.op and _are_same(last, op_schema):
        return results
    return propagator()._propagate_tensor_meta_non_cached(op_schema)


def _are_same(left: Any, right: Any) -> bool:
    """Whether two calls have the same objects, not only equal ones, for their arguments."""
    pairs = [tree_leaves((schema.args_schema, schema.kwargs_schema)) for schema in (left, right)]
    return len(pairs[0]) == len(pairs[1]) and all(map(operator.is_, *pairs))


def results_of(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Any
) -> list[TensorInfo]:
    """What an operator would return, given a `TensorInfo` in the place of each tensor."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema

    def spec(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            meta = TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
            return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return list(map(spec, value)) if isinstance(value, (list, tuple)) else value

    schema = OpSchema(op, tuple(map(spec, args)), {n: spec(v) for n, v in kwargs.items()})
    return list(_infos(propagator()._propagate_tensor_meta_non_cached(schema)))


def _with_specs(op_schema: Any) -> Any:
    """The call that DTensor asks about, with the spec of each tensor instead of its strategy."""
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


def _combinations(
    call: Call, strategies: Sequence[Any], mesh: Any, rows: Sequence[Row], moving: Moving
) -> Iterator[tuple[Row, ...]]:
    """A row for each dimension of the mesh, in every way that is possible.

    A written tensor keeps its placement, or the operator would not write into the caller's tensor.
    Keyword-only tensors keep theirs too, if DTensor moves the others: it never moves these.
    """
    positional = sum(each.argument < len(call.args) for each in call.inputs)
    fixed = [
        index
        for index, each in enumerate(call.inputs)
        if (each.is_written and moving is not Moving.ALL)
        or (index >= positional and moving is Moving.ARGUMENTS)
    ]
    current = [_current(strategy) for strategy in strategies]
    choices = [
        [
            row
            for row in _with_strides(rows, [placements[dim] for placements in current])
            if all(row.inputs[index] == current[index][dim] for index in fixed)
        ]
        for dim in range(mesh.ndim)
    ]
    for combination in itertools.product(*choices):
        if _is_possible(call, strategies, mesh, combination):
            yield combination


def _current(strategy: Any) -> tuple[Any, ...]:
    placements: tuple[Any, ...] = strategy.strategies[0].output_spec.placements
    return placements


def _with_strides(rows: Sequence[Row], current: Sequence[Any]) -> Iterator[Row]:
    """The rows, and each with the strided shards that inputs have on this mesh dimension now."""
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


def _is_possible(
    call: Call, strategies: Sequence[Any], mesh: Any, combination: Sequence[Row]
) -> bool:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._ops.utils import is_tensor_shardable

    count = len(call.results)
    for index in range(count + len(strategies)):
        tensors = [(*row.results, *row.inputs)[index] for row in combination]
        if len({p.reduce_op for p in tensors if p.is_partial()}) > 1:
            return False  # a sum of maxima is not a maximum of sums
    for index, strategy in enumerate(strategies):
        placements = tuple(row.inputs[index] for row in combination)
        if placements != _current(strategy):
            spec = DTensorSpec(mesh, placements, tensor_meta=strategy.tensor_meta)
            if not is_tensor_shardable(strategy.tensor_meta.shape, spec):
                return False
        for row, placement in zip(combination, placements, strict=True):
            is_part = row.reduction is not None and _is_shard(placement)
            if is_part and not _is_reducible(
                strategy.tensor_meta, mesh, placements, placement, row
            ):
                return False
    return True


def _is_shard(placement: Any) -> bool:
    return hasattr(placement, "dim")  # Shard, and _StridedShard, which is none


def _is_reducible(meta: Any, mesh: Any, placements: Sequence[Any], shard: Any, row: Row) -> bool:
    """Whether parts of a dimension can be reduced: averages need equal ones, others none empty."""
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


def _op_spec(
    op: OpOverload, call: Call, strategies: Sequence[Any], mesh: Any, combination: Sequence[Row]
) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSpec
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    outputs = [
        DTensorSpec(
            mesh,
            tuple(row.results[index] for row in combination),
            tensor_meta=TensorMeta(torch.Size(info.shape), info.stride, info.dtype),
        )
        for index, info in enumerate(call.results)
    ]
    inputs = [
        DTensorSpec(
            mesh,
            tuple(row.inputs[index] for row in combination),
            tensor_meta=strategy.tensor_meta,
        )
        for index, strategy in enumerate(strategies)
    ]
    returns = op._schema.returns
    is_single = len(returns) == 1 and str(returns[0].real_type) == "Tensor"
    return OpSpec(
        output_specs=None if not outputs else outputs[0] if is_single else tuple(outputs),
        input_specs=inputs,
        redistribute_cost=[
            generate_redistribute_costs(strategy, spec)
            for strategy, spec in zip(strategies, inputs, strict=True)
        ],
    )


def _immovable(
    op: OpOverload, call: Call, strategies: Sequence[Any], mesh: Any, rows: Sequence[Row]
) -> ShardingError:
    """Names the argument that would have to be moved, and the cheapest placements for it."""
    specs = [
        _op_spec(op, call, strategies, mesh, combination)
        for combination in _combinations(call, strategies, mesh, rows, Moving.ALL)
    ]
    best = min(specs, key=cost)
    for index, each in enumerate(call.inputs):
        wanted, current = best.input_specs[index].placements, _current(strategies[index])
        if each.is_written and wanted != current:
            name = op._schema.arguments[each.argument].name
            return ShardingError(
                f"{op.name()}: the operator writes into {name!r}, whose placements are "
                f"{short_repr(list(current))}. The sharding rule does not accept these placements, "
                "and DTensor cannot redistribute an argument that is written, because the "
                f"caller's tensor would not change. Redistribute it before the call: {name} = "
                f"{name}.redistribute(placements={short_repr(list(wanted))})."
            )
    raise AssertionError("the rule accepts all placements of what is written")
