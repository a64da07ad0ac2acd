"""DTensor's registry of operators: their strategies, the keys of its caches, and forgetting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchop._compat.classes import OpOverload
from torchop._compat.dtensor import Row, Rows, first_hashed, holds_tensors
from torchop._compat.dtensor_strategies import (
    Moving,
    cheapest,
    decisive_specs,
    op_specs,
    propagator,
    rows_of,
)


class Registration:
    """The strategy of one operator, and what it replaced.

    Attributes:
        op: the operator.
        may_be_stale: whether another thread may have decisions of an earlier rule in the cache of
            its own, which only that thread can clear.
    """

    def __init__(self, op: OpOverload, rows: Rows, unhashed: Sequence[str]) -> None:
        self.op = op
        self.rows = rows
        self.may_be_stale = bool(_callers.get(op.name(), set()) - {threading.get_ident()})
        self._decisions: dict[Any, Any] = {}
        self._keywords: dict[Any, dict[str, Any]] = {}
        self._choices: dict[Any, Any] = {}
        engine = propagator()
        self._replaced = [
            (registry, registry.pop(op, None))
            for name in _REGISTRIES
            if (registry := getattr(engine, name, None)) is not None
        ]
        engine.register_op_strategy(op, self.strategy, _schema_info(op, unhashed))
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

        specs = self._specs(op_schema)
        names = [argument.name for argument in self.op._schema.arguments]
        tensors = [n for n, v in op_schema.kwargs_schema.items() if isinstance(v, DTensorSpec)]
        tensors.sort(key=names.index)
        wanted = cheapest(specs, op_schema).input_specs[-len(tensors) :]
        return dict(zip(tensors, wanted, strict=True))

    def _specs(self, op_schema: Any) -> list[Any]:
        """All placements that are accepted if tensors by keyword may be moved too."""
        with_strategies = propagator()._wrap_with_op_strategy(op_schema)
        return op_specs(self.op, self.rows, with_strategies, Moving.KEYWORDS)

    def chosen(self, op_schema: Any, accepts: Callable[[Row], bool]) -> Any:
        """The cheapest placements of which each dimension of the mesh is acceptable."""

        def decide(op_schema: Any) -> Any:
            specs = [spec for spec in self._specs(op_schema) if all(map(accepts, rows_of(spec)))]
            return cheapest(specs, op_schema)

        return self._remembered(self._choices, op_schema, decide)

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


def clear_caches() -> None:
    """Forgets what this thread has propagated: calls ask the strategies again."""
    propagator().propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


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
