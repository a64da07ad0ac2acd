"""DTensor's dispatch of one call: what it passes to the operator, and what it makes of the result.

PyTorch does this in C++, and it is right for most operators. This file does the same in Python,
from the same parts, for calls that PyTorch would get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchop._compat.classes import OpOverload
from torchop._compat.dtensor import Row, holds_tensors, is_written
from torchop._compat.dtensor_registry import Registration, moved
from torchop._compat.dtensor_strategies import results_of_spec

# The types of non-tensor arguments that torch hashes in C++; others have no key in its cache.
_HASHABLE = ("int", "float", "bool", "str", "number", "Device", "ScalarType", "Layout")


def needs_python(op: OpOverload) -> bool:
    """Whether PyTorch's own dispatch would be wrong for some calls of an operator.

    It never moves a tensor by keyword; takes every operator whose name ends in an underscore for
    one that returns its first argument; and cannot hash arguments of every type.
    """
    arguments, returns = op._schema.arguments, op._schema.returns
    by_keyword = any(a.kwarg_only and holds_tensors(a) for a in arguments)
    misnamed = op._schema.name.endswith("_") and any(r.alias_info is None for r in returns)
    return by_keyword or misnamed or not all(map(_is_hashable, arguments))


def _is_hashable(argument: Any) -> bool:
    kind = str(argument.real_type)
    for wrapper in ("Optional", "List"):
        kind = kind.removeprefix(f"{wrapper}[").removesuffix("]")
    return holds_tensors(argument) or kind in _HASHABLE


def take_over(op: OpOverload, registration: Registration) -> None:
    """Has DTensor call an operator through `dispatch`."""

    def handler(op: OpOverload, args: Any, kwargs: Any) -> Any:
        return dispatch(registration, args, kwargs)

    _handlers()[op] = handler


def release(op: OpOverload) -> None:
    """Takes `take_over` back."""
    _handlers().pop(op, None)


def _handlers() -> dict[Any, Callable[..., Any]]:
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def dispatch(registration: Registration, args: Any, kwargs: Any) -> Any:
    """Calls an operator on DTensors."""
    from torch.distributed.tensor import DTensor

    op, dispatcher = registration.op, DTensor._op_dispatcher
    kwargs = registration.moved_keywords(args, kwargs)
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    info.output_sharding = registration.propagate(info.schema)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return wrapped(op, args, kwargs, results, info.output_sharding.output_spec)


def wrapped(op: OpOverload, args: Any, kwargs: Any, results: Any, specs: Any) -> Any:
    """The results as DTensors, and as the caller's own where they are arguments."""
    from torch.distributed.tensor import DTensor

    dtensors: Any = DTensor._op_dispatcher.wrap(results, specs)
    written = {
        name: args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if is_written(argument)
        for name in _aliases(argument)
    }
    returns = op._schema.returns
    aliased = [next((written[n] for n in _aliases(r) if n in written), None) for r in returns]
    if len(returns) == 1:
        return dtensors if aliased[0] is None else aliased[0]
    if not returns:
        return None
    return tuple(w if o is None else o for w, o in zip(dtensors, aliased, strict=True))


def _aliases(value: Any) -> set[str]:
    """The memory of an argument or a result, by the schema's names for it."""
    return set() if value.alias_info is None else set(value.alias_info.before_set)


class OnShards(NamedTuple):
    """The arguments of a call on this rank, and the specs of everything in it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Any]
    results: list[Any]
    output_specs: Any
    mesh: Any


def on_shards(
    registration: Registration,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    accepts: Callable[[Row], bool],
) -> OnShards:
    """Moves the tensors of a call to acceptable placements, and takes the shards of this rank."""
    from torch.distributed.tensor import DTensor

    info = DTensor._op_dispatcher.unwrap_to_op_info(registration.op, tuple(args), dict(kwargs))
    spec = registration.chosen(info.schema, accepts)
    wanted = iter(spec.input_specs)

    def shard(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(shard, value))
        if not isinstance(value, torch.Tensor):
            return value
        place = next(wanted)
        return moved(value, place)._local_tensor if isinstance(value, DTensor) else value

    positional = tuple(map(shard, args))
    names = [argument.name for argument in registration.op._schema.arguments]
    keywords = {name: shard(kwargs[name]) for name in sorted(kwargs, key=names.index)}
    return OnShards(
        positional,
        keywords,
        list(spec.input_specs),
        results_of_spec(spec),
        spec.output_specs,
        spec.mesh,
    )


def shard_of(value: Any, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """The shard of this rank of a DTensor with other placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=value._spec.tensor_meta)
    local: torch.Tensor = moved(value, spec)._local_tensor
    return local


def as_dtensor(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Any, stride: Any
) -> torch.Tensor:
    """A DTensor of which this rank has the shard `local`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


# --------------------------------------------------------------------------------------------------
# What DTensor raises for operators without a rule


def explain_missing(explain: Callable[[OpOverload], Exception | None]) -> None:
    """Has DTensor raise what `explain` returns of an operator that it cannot shard."""
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    name = "propagate_op_sharding_non_cached"
    propagate = getattr(propagator, name)
    if getattr(propagate, "__module__", None) == __name__:
        return

    def propagate_op_sharding(op_schema: Any) -> Any:
        try:
            return propagate(op_schema)
        except NotImplementedError as error:
            if "does not have a sharding strategy registered" not in str(error):
                raise
            explained = explain(op_schema.op)
            if explained is None:
                raise
            raise explained from error

    setattr(propagator, name, propagate_op_sharding)
