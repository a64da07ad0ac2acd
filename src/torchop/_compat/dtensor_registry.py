"""Register sharding strategies with DTensor, and dispatch calls to some operators in Python.

DTensor's C++ code handles calls to some operators incorrectly (see `needs_python`), so this module
dispatches these calls in Python, with DTensor's helper functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchop._compat.classes import OpOverload
from torchop._compat.dtensor import clear_caches, propagator
from torchop._compat.dtensor_aten import SIZES, specs_like
from torchop._compat.dtensor_calls import Rows, first_hashed, holds_tensors, is_written
from torchop._compat.dtensor_strategies import (
    Redistributable,
    cheapest,
    decisive_specs,
    op_specs,
)


class Registration:
    """An operator's sharding strategy, which is registered with DTensor until `undo` is called.

    `may_be_stale` is true if DTensor's caches in other threads may still contain placements from an
    earlier sharding rule for this operator. The caches are thread-local, so this thread cannot
    clear them.
    """

    def __init__(
        self, op: OpOverload, rows: Rows, unhashed: Sequence[str], like: OpOverload | None = None
    ) -> None:
        self.op = op
        self.rows = rows
        self._like = like
        self.may_be_stale = bool(_callers.get(op.name(), set()) - {threading.get_ident()})
        self._decisions: dict[Any, Any] = {}
        self._keywords: dict[Any, dict[str, Any]] = {}
        engine = propagator()
        self._replaced = [
            (registry, registry.pop(op, None))
            for name in _REGISTRIES
            if (registry := getattr(engine, name, None)) is not None
        ]
        engine.register_op_strategy(op, self.strategy, _schema_info(op, unhashed))
        if like is not None:
            for sizes in (getattr(engine, name, {}) for name in SIZES):
                if like in sizes:
                    self._replaced.append((sizes, sizes.get(op)))
                    sizes[op] = sizes[like]
        clear_caches()

    def undo(self) -> None:
        for registry, value in self._replaced:
            registry.pop(self.op, None)
            if value is not None:
                registry[self.op] = value
        clear_caches()

    def strategy(self, op_schema: Any) -> Any:
        """Return the candidate strategies for a call that is not in DTensor's cache."""
        from torch.distributed.tensor._op_schema import OpStrategy

        _callers.setdefault(self.op.name(), set()).add(threading.get_ident())
        if self._like is not None:
            return OpStrategy(specs_like(self.op, self._like, self.rows, op_schema))
        return OpStrategy(decisive_specs(self.op, self.rows, op_schema))

    def propagate(self, op_schema: Any) -> Any:
        """Return the placements that DTensor chooses for a call.

        DTensor's own caches are thread-local, so cache the placements here for all threads.
        """
        return self._remembered(
            self._decisions, op_schema, propagator().propagate_op_sharding_non_cached
        )

    def redistributed_keywords(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Redistribute the tensors in the keyword arguments as the sharding rule requires.

        Workaround for pytorch/pytorch#167977: DTensor redistributes only positional arguments, so
        the operator would compute wrong results if a keyword argument had placements that the
        sharding rule does not accept. Remove this when the issue is fixed.
        """
        from torch.distributed.tensor import DTensor

        tensors = [name for name, value in kwargs.items() if isinstance(value, DTensor)]
        if not tensors:
            return dict(kwargs)
        schema = DTensor._op_dispatcher.unwrap_to_op_info(self.op, args, kwargs).schema
        wanted = self._remembered(self._keywords, schema, self._wanted_keywords)
        return {
            name: redistributed(value, wanted[name]) if name in tensors else value
            for name, value in kwargs.items()
        }

    def _wanted_keywords(self, op_schema: Any) -> dict[str, Any]:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        with_strategies = propagator()._wrap_with_op_strategy(op_schema)
        specs = op_specs(self.op, self.rows, with_strategies, Redistributable.KEYWORDS)
        names = [argument.name for argument in self.op._schema.arguments]
        tensors = [n for n, v in op_schema.kwargs_schema.items() if isinstance(v, DTensorSpec)]
        tensors.sort(key=names.index)
        wanted = cheapest(specs, op_schema).input_specs[-len(tensors) :]
        return dict(zip(tensors, wanted, strict=True))

    def _remembered(self, cache: dict[Any, Any], op_schema: Any, decide: Any) -> Any:
        from torch.distributed._functional_collectives import _are_we_tracing

        if _are_we_tracing():  # symbolic sizes are not hashable
            return decide(op_schema)
        # The key must include the types, because 1, 1.0 and True are equal.
        key = (op_schema, *map(type, op_schema.args_schema))
        try:
            return cache[key]
        except KeyError:
            decision = cache[key] = decide(op_schema)
            return decision
        except TypeError:  # an argument is not hashable
            return decide(op_schema)


def redistributed(value: Any, spec: Any) -> Any:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    if value.placements == spec.placements:
        return value
    local = redistribute_local_tensor(value._local_tensor, value._spec, spec)
    return DTensor(local, spec, requires_grad=False)


# Maps each operator name to the threads in which DTensor has run the operator's strategy. DTensor
# caches its decisions per thread, under the address of the overload. If the operator is redefined
# and the new overload gets the same address, these threads may reuse a stale decision.
_callers: dict[str, set[int]] = {}


_REGISTRIES = (
    "op_strategy_funcs",
    "op_to_schema_info",
    "op_to_rules",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info_for_single_dim_strategy",
)


def _schema_info(op: OpOverload, unhashed: Sequence[str]) -> Any:
    """Return a RuntimeSchemaInfo that makes DTensor include non-tensor arguments in cache keys.

    The arguments in `unhashed` are left out. All other keyword-only arguments are listed in
    `static_kwargkey`, even tensors: without this, DTensor's keys would ignore tensors that are
    passed by keyword.
    """
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    arguments = op._schema.arguments
    keywords = [a.name for a in arguments if a.kwarg_only and a.name not in unhashed]
    first = first_hashed(op, unhashed)
    return RuntimeSchemaInfo(
        static_argnum=len(arguments) if first is None else first,
        static_kwargkey=keywords or None,
        needs_pytree=any("List[" in str(a.real_type) for a in arguments if holds_tensors(a)),
    )


# The non-tensor argument types that DTensor's C++ cache can include in its keys.
_HASHABLE = ("int", "float", "bool", "str", "number", "Device", "ScalarType", "Layout")


def needs_python(op: OpOverload) -> bool:
    """Return whether DTensor's C++ code would handle some calls to an operator incorrectly.

    The C++ code does not redistribute tensors in keyword arguments (pytorch/pytorch#167977). It
    treats every operator whose name ends in an underscore as in-place, even if the operator returns
    a new tensor (`OpSchema.is_inplace_op` in torch/distributed/tensor/_op_schema.py). Its cache
    supports only some types of arguments.
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
    """Make DTensor pass calls to an operator to `dispatch` in this module."""

    def handler(op: OpOverload, args: Any, kwargs: Any) -> Any:
        return dispatch(registration, args, kwargs)

    _handlers()[op] = handler


def release(op: OpOverload) -> None:
    _handlers().pop(op, None)


def _handlers() -> dict[Any, Callable[..., Any]]:
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def dispatch(registration: Registration, args: Any, kwargs: Any) -> Any:
    from torch.distributed.tensor import DTensor

    op, dispatcher = registration.op, DTensor._op_dispatcher
    kwargs = registration.redistributed_keywords(args, kwargs)
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    info.output_sharding = registration.propagate(info.schema)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return wrapped(op, args, kwargs, results, info.output_sharding.output_spec)


def wrapped(op: OpOverload, args: Any, kwargs: Any, results: Any, specs: Any) -> Any:
    """Wrap results as DTensors, but return the argument itself for a result that aliases it."""
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
    return set() if value.alias_info is None else set(value.alias_info.before_set)


def explain_missing(explain: Callable[[OpOverload], Exception | None]) -> None:
    """Replace DTensor's error for an operator without a sharding strategy with `explain(op)`.

    If `explain` returns None, DTensor's own error is raised.
    """
    engine = propagator()
    propagate = engine.propagate_op_sharding_non_cached

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

    engine.propagate_op_sharding_non_cached = propagate_op_sharding
