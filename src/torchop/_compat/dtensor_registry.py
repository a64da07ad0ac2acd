"""What DTensor does with an operator: its registry, the keys of its caches, and its dispatch.

PyTorch dispatches calls in C++, and is right for most operators. This file does the same in Python,
from the same parts, for calls that PyTorch would get wrong.
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
    Moving,
    cheapest,
    decisive_specs,
    op_specs,
)


class Registration:
    """The strategy of one operator, and what it replaced.

    Attributes:
        op: the operator.
        rows: the placements that its rule accepts for a call.
        may_be_stale: whether another thread may have decisions of an earlier rule in the cache of
            its own, which only that thread can clear.
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
        """Restores what was registered before."""
        for registry, value in self._replaced:
            registry.pop(self.op, None)
            if value is not None:
                registry[self.op] = value
        clear_caches()

    def strategy(self, op_schema: Any) -> Any:
        """What DTensor asks where its cache has no answer: the placements to decide between."""
        from torch.distributed.tensor._op_schema import OpStrategy

        _callers.setdefault(self.op.name(), set()).add(threading.get_ident())
        if self._like is not None:
            return OpStrategy(specs_like(self.op, self._like, self.rows, op_schema))
        return OpStrategy(decisive_specs(self.op, self.rows, op_schema))

    def propagate(self, op_schema: Any) -> Any:
        """DTensor's decision about a call, from a cache that all threads share."""
        return self._remembered(
            self._decisions, op_schema, propagator().propagate_op_sharding_non_cached
        )

    def moved_keywords(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The keyword arguments, with tensors where the rule wants them: DTensor moves none."""
        from torch.distributed.tensor import DTensor

        tensors = [name for name, value in kwargs.items() if isinstance(value, DTensor)]
        if not tensors:
            return dict(kwargs)
        schema = DTensor._op_dispatcher.unwrap_to_op_info(self.op, args, kwargs).schema
        wanted = self._remembered(self._keywords, schema, self._wanted_keywords)
        return {
            name: moved(value, wanted[name]) if name in tensors else value
            for name, value in kwargs.items()
        }

    def _wanted_keywords(self, op_schema: Any) -> dict[str, Any]:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        # All placements that are accepted if tensors by keyword may be moved too.
        with_strategies = propagator()._wrap_with_op_strategy(op_schema)
        specs = op_specs(self.op, self.rows, with_strategies, Moving.KEYWORDS)
        names = [argument.name for argument in self.op._schema.arguments]
        tensors = [n for n, v in op_schema.kwargs_schema.items() if isinstance(v, DTensorSpec)]
        tensors.sort(key=names.index)
        wanted = cheapest(specs, op_schema).input_specs[-len(tensors) :]
        return dict(zip(tensors, wanted, strict=True))

    def _remembered(self, cache: dict[Any, Any], op_schema: Any, decide: Any) -> Any:
        from torch.distributed._functional_collectives import _are_we_tracing

        if _are_we_tracing():  # symbolic sizes have no hash
            return decide(op_schema)
        # For Python, 1, 1.0 and True are the same key.
        key = (op_schema, *map(type, op_schema.args_schema))
        try:
            return cache[key]
        except KeyError:
            decision = cache[key] = decide(op_schema)
            return decision
        except TypeError:  # an argument has no hash
            return decide(op_schema)


def moved(value: Any, spec: Any) -> Any:
    """A DTensor with other placements. Its own method makes no pending sums."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    if value.placements == spec.placements:
        return value
    local = redistribute_local_tensor(value._local_tensor, value._spec, spec)
    return DTensor(local, spec, requires_grad=False)


# The threads in which DTensor has asked for the strategy of an operator, by name. A new operator of
# the same name may get the address of the old one, and be mistaken for it.
_callers: dict[str, set[int]] = {}


_REGISTRIES = (
    "op_strategy_funcs",
    "op_to_schema_info",
    "op_to_rules",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info_for_single_dim_strategy",
)


def _schema_info(op: OpOverload, unhashed: Sequence[str]) -> Any:
    """Puts every argument that is not a tensor into the key of DTensor's caches.

    A tensor by keyword is in the key only if there is a list of keywords.
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


# --------------------------------------------------------------------------------------------------
# What DTensor raises for operators without a rule


def explain_missing(explain: Callable[[OpOverload], Exception | None]) -> None:
    """Has DTensor raise what `explain` returns of an operator that it cannot shard."""
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
