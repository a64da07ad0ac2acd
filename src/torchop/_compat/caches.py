"""What PyTorch remembers of an operator beside the dispatcher, and forgetting it when it is gone.

What is kept by name is wrong for the next operator of the name. What is kept by object is right,
and keeps the object for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch._library.simple_registry import SimpleOperatorEntry
from torch._library.simple_registry import singleton as _rules_registry
from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

from torchop._compat import operators
from torchop._compat.classes import OpOverload

# Sets and dictionaries by OpOverload or packet.
_BY_OBJECT = (
    ("torch._ops", "cached_ops"),
    ("torch._inductor.lowering", "lowerings"),
    ("torch._inductor.lowering", "fallbacks"),
    ("torch._inductor.lowering", "needs_realized_inputs"),
    ("torch._inductor.lowering", "_maybe_layout_constraints"),
    ("torch._inductor.decomposition", "decompositions"),
    ("torch._decomp", "decomposition_table"),
    ("torch._decomp", "pre_autograd_decomposition_table"),
    ("torch._decomp", "meta_table"),
    ("torch.fx.node", "_side_effectful_functions"),
    ("torch.utils.flop_counter", "flop_registry"),
)
# Functions that remember their results, by OpOverload: they cannot forget a single one.
_FUNCTIONS = (
    ("torch._subclasses.fake_tensor", "get_schema_info"),
    ("torch._subclasses.functional_tensor", "_can_decompose_fast"),
    ("torch.utils._python_dispatch", "get_alias_info"),
    ("torch._functorch._aot_autograd.runtime_wrappers", "_is_fsdp_all_gather_copy_in"),
)


def forget_signature(namespace: str, name: str, overload: str) -> None:
    """Forgets the signature that FX made of a schema."""
    _SCHEMA_TO_SIGNATURE_CACHE.pop((f"{namespace}::{name}", overload), None)


def forget_entry(namespace: str, name: str, overload: str) -> None:
    """Forgets the effect of an operator, and its entry in torch.library's registry.

    What other libraries have registered there by name stays, as their kernels do.
    """
    qualname = operators.joined(namespace, name, overload)
    entry = _rules_registry._data.get(qualname)
    if entry is not None:
        entry.effect.register(None)
        if _contents(entry) == _contents(SimpleOperatorEntry(qualname)):
            _rules_registry._data.pop(qualname, None)


def _contents(entry: SimpleOperatorEntry) -> Mapping[str, Any]:
    """What is registered in an entry, by part of it."""
    return {
        name: vars(holder) if hasattr(holder, "__dict__") else holder
        for name, holder in vars(entry).items()
    }


def forget_objects(ops: Collection[Any]) -> None:
    """Forgets what is kept by OpOverloads and packets that nobody can call any more."""
    for collection in filter(None, (_loaded(*place) for place in _BY_OBJECT)):
        remove = collection.discard if hasattr(collection, "discard") else collection.pop
        for op in ops:
            if op in collection:
                remove(op)
    cache = getattr(_loaded("torch._subclasses.fake_tensor", "FakeTensorMode"), "cache", {})
    identities = set(map(id, ops))
    for key in list(cache):
        called = key.key[0]
        # Only what is called by a higher-order operator is among the arguments; looking at those of
        # every call would take long where much was traced.
        parts = (called,) if isinstance(called, OpOverload) else key.key
        if not identities.isdisjoint(map(id, parts)):
            cache.pop(key, None)
    for function in filter(None, (_loaded(*place) for place in _FUNCTIONS)):
        function.cache_clear()


def _loaded(module: str, name: str) -> Any:
    """An attribute of a module, if the module is imported and has it."""
    return getattr(sys.modules.get(module), name, None)
