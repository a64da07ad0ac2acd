"""Shard a custom operator with the sharding rule that DTensor has for an ATen operator.

The user names an ATen operator with the same signature, and DTensor's rule for that operator then
also decides the placements of the custom operator's inputs and results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchop._compat import dtensor_strategies
from torchop._compat.classes import OpOverload, tree_leaves
from torchop._compat.dtensor import propagator
from torchop._compat.dtensor_calls import Call, Row, Rows, TensorInfo, is_written
from torchop._compat.dtensor_moves import Inputs
from torchop._compat.dtensor_strategies import Redistributable
from torchop._errors import ShardingError, short_text

_RULES = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
# DTensor's tables of operators with sizes among their arguments. In calls to these operators,
# DTensor replaces the global sizes with the sizes of the local shard.
SIZES = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster")
# If there are more combinations of input placements than this, `rows_like` tries only some of them.
_MOST_COMBINATIONS = 256


def refusal(op: OpOverload, aten: OpOverload) -> str | None:
    """Return why DTensor's sharding rule for `aten` cannot be used for `op`, or None if it can."""
    reason = _reason(aten)
    if reason is None:
        return None
    return (
        f"{op.name()}: DTensor's rule for {aten.name()} cannot shard another operator: {reason}. "
        "Write a rule such as 'b k, k n -> b n'. If in doubt, write 'replicate', which is right "
        "for every operator."
    )


def _reason(aten: OpOverload) -> str | None:
    from torch.distributed.tensor import DTensor

    engine = propagator()
    handler = DTensor._op_dispatcher._custom_op_handlers.get(aten)
    # A handler that `dtensor_registry.take_over` installed still uses DTensor's sharding rule, so
    # ignore it.
    if handler is not None and not handler.__module__.startswith("torchop."):
        return "DTensor runs it with custom code instead of a rule"
    if aten in getattr(engine, "squeeze_op_to_dims_variant", ()):
        return "DTensor replaces it with another operator"
    if any(aten in getattr(engine, name, ()) for name in _RULES):
        return None
    decompositions = getattr(engine, "decomp_strategy", None)
    if decompositions is not None and decompositions.has_decomp(aten):
        return None
    return "DTensor has no rule for it"


def specs_like(op: OpOverload, aten: OpOverload, rows: Rows, op_schema: Any) -> list[Any]:
    """Return the strategies that DTensor would use for a call to `aten` with the same arguments."""
    from torch.distributed.tensor._op_schema import OpSpec

    call, strategies = dtensor_strategies.call_of(op, op_schema)
    inputs = Inputs(strategies, call.mesh)
    if any(len(strategy.strategies) != 1 for strategy in strategies):
        # DTensor's auto-parallel planner passes several possible placements for each tensor, but a
        # sharding rule takes only one, so return a strategy for every combination that the rule
        # accepts.
        return dtensor_strategies.op_specs(op, rows, op_schema, Redistributable.ARGUMENTS)
    schema = dtensor_strategies.with_specs(op_schema)
    outputs, wanted = _decision(op, aten, schema.args_schema, schema.kwargs_schema, call.results)
    for each, current, spec in zip(call.inputs, inputs.current, wanted, strict=True):
        if each.is_written and spec.placements != current:
            why = f"DTensor's rule for {aten.name()} needs {list(spec.placements)}"
            raise dtensor_strategies.written_elsewhere(
                op, each.argument, current, spec.placements, why
            )
    costs = [inputs.costs(index, spec.placements) for index, spec in enumerate(wanted)]
    return [OpSpec(output_specs=outputs, input_specs=wanted, redistribute_cost=costs)]


def rows_like(op: OpOverload, aten: OpOverload, call: Call) -> list[Row]:
    """Return the placements that DTensor's rule for `aten` accepts, on one mesh dimension.

    DTensor's rules do not list the placements that they accept. A rule only maps the placements of
    the inputs to the placements to use, so call it with many combinations of input placements, and
    collect the results.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    rest = (Replicate(),) * (call.mesh.ndim - 1)

    def row(placements: Sequence[Any]) -> Row:
        def spec(value: Any) -> Any:
            if isinstance(value, TensorInfo):
                return DTensorSpec(call.mesh, (next(each), *rest), tensor_meta=value.meta)
            return list(map(spec, value)) if isinstance(value, (list, tuple)) else value

        each = iter(placements)
        args = tuple(map(spec, call.args))
        kwargs = {name: spec(value) for name, value in call.kwargs.items()}
        outputs, wanted = _decision(op, aten, args, kwargs, call.results)
        results = [s.placements[0] for s in _specs_in(outputs)]
        placements = [s.placements[0] for s in wanted]
        pending = [p.reduce_op for p in results if p.is_partial()]
        is_reduced = bool(pending) and any(p.is_shard() for p in placements)
        return Row(results, placements, pending[0] if is_reduced else None)

    whole, *others = _combinations(call)
    rows = [row(whole)]
    for placements in others:
        try:
            found = row(placements)
        except ShardingError:  # the rule rejects these input placements
            continue
        if found not in rows and all(map(_is_plain, (*found.results, *found.inputs))):
            rows.append(found)
    return rows


def _combinations(call: Call) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of input placements on one mesh dimension, all-replicated first."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    choices = [[Replicate(), *map(Shard, range(each.info.ndim)), Partial()] for each in call.inputs]
    if math.prod(map(len, choices)) <= _MOST_COMBINATIONS:
        yield from itertools.product(*choices)
        return
    whole = (Replicate(),) * len(choices)
    yield whole
    for index, placements in enumerate(choices):
        for placement in placements[1:]:
            yield (*whole[:index], placement, *whole[index + 1 :])
            yield tuple(placement if placement in each else Replicate() for each in choices)


def _is_plain(placement: Any) -> bool:
    """Return whether a placement has a basic type, unlike the masked Partial of an embedding."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return type(placement) in (Partial, Replicate, Shard)


def _decision(
    op: OpOverload,
    aten: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[TensorInfo],
) -> tuple[Any, list[Any]]:
    from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo

    # Check `refusal` here, because it could not run at registration time if DTensor was not
    # imported yet.
    refused = refusal(op, aten)
    if refused is not None:
        raise ShardingError(refused)
    positional, keywords = _as_aten(op, aten, args, kwargs)
    # `OpSchema.args_spec` ignores tensors in lists unless `needs_pytree` is set.
    info = RuntimeSchemaInfo(needs_pytree=any(isinstance(a, (list, tuple)) for a in positional))
    schema = OpSchema(aten, positional, keywords, schema_info=info)
    try:
        with dtensor_strategies.assumed_results(schema, _metas(op, results)):
            decided = propagator().propagate_op_sharding_non_cached(schema)
    except ShardingError:
        raise
    except Exception as error:
        raise ShardingError(
            f"{op.name()}: DTensor's rule for {aten.name()}, used for this operator, raised "
            f"{type(error).__name__}: {short_text(error)}"
        ) from error
    redistributed = decided.redistribute_schema if decided.needs_redistribute else None
    return decided.output_spec, _specs_in((redistributed or schema).args_schema)


def _specs_in(values: Any) -> list[Any]:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return [value for value in tree_leaves(values) if isinstance(value, DTensorSpec)]


def _as_aten(
    op: OpOverload, aten: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the arguments of a call to `op` to the arguments of the same call to `aten`.

    The dispatcher drops arguments that equal their default, but the two operators may have
    different defaults. So insert the dropped defaults of `op`, and then drop the defaults of
    `aten`.
    """
    arguments, theirs = op._schema.arguments, aten._schema.arguments
    values = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
    given = [values.get(a.name, a.default_value) for a in arguments if not a.kwarg_only]
    defaults = [a for a in theirs if not a.kwarg_only]
    while given and _is_default(defaults[len(given) - 1], given[-1]):
        given.pop()
    by_name = {a.name: a for a in theirs}
    keywords = {
        a.name: value
        for a in arguments
        if a.kwarg_only
        and not _is_default(by_name[a.name], value := values.get(a.name, a.default_value))
    }
    return tuple(given), keywords


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value():
        return False
    default = argument.default_value
    return type(value) is type(default) and bool(value == default)


def _metas(op: OpOverload, results: Sequence[TensorInfo]) -> Any:
    metas = [result.meta for result in results]
    returns = op._schema.returns
    if not returns:
        return None
    if len(returns) == 1 and str(returns[0].real_type) == "Tensor":
        return metas[0]
    return tuple(metas)


def difference(op: OpOverload, aten: OpOverload) -> str | None:
    """Describe how the signatures of `op` and `aten` differ. Return None if they do not.

    `op` may omit an argument of `aten` that has a default.
    """
    ours, theirs = ([a for a in o._schema.arguments if not a.kwarg_only] for o in (op, aten))
    mine, named = ({a.name: a for a in o._schema.arguments if a.kwarg_only} for o in (op, aten))
    if len(ours) > len(theirs):
        return f"it takes {len(ours)} positional arguments instead of {len(theirs)}"
    extra = [name for name in mine if name not in named]
    if extra:
        return f"{aten.name()} has no keyword-only argument {extra[0]!r}"
    pairs = [*zip(ours, theirs, strict=False), *((mine[name], named[name]) for name in mine)]
    for our, their in pairs:
        if not our.type.isSubtypeOf(their.type):
            return f"{our.name!r} is of type {our.type} instead of {their.type}"
        if is_written(our) != is_written(their):
            writes = "written" if is_written(our) else "not written"
            return f"{our.name!r} is {writes}, unlike {their.name!r}"
    missing = [*theirs[len(ours) :], *(a for name, a in named.items() if name not in mine)]
    for their in missing:
        if not their.has_default_value():
            return f"it lacks the argument {their.name!r}, which has no default"
    kinds = [[str(r.type) for r in o._schema.returns] for o in (op, aten)]
    if kinds[0] != kinds[1]:
        return f"it returns ({', '.join(kinds[0])}) instead of ({', '.join(kinds[1])})"
    aliases = [[is_written(r) for r in o._schema.returns] for o in (op, aten)]
    if aliases[0] != aliases[1]:
        return "only one of them returns an argument that it writes"
    return None
