"""Remove deregistered operators from PyTorch's caches.

Some of PyTorch's caches are keyed by operator name, so a stale entry would affect the next operator
of that name. Others are keyed by overload or packet, and would keep these objects alive forever.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch._library.simple_registry import SimpleOperatorEntry
from torch._library.simple_registry import singleton as _rules_registry

from torchop._compat.classes import OpOverload

# PyTorch's sets and dictionaries that are keyed by OpOverload or OpOverloadPacket objects, as pairs
# of a module name and the name of a variable in that module.
_BY_OBJECT = (
    ("torch._ops", "cached_ops"),
    ("torch._inductor.lowering", "lowerings"),
    ("torch._inductor.lowering", "user_lowerings"),
    ("torch._inductor.lowering", "fallbacks"),
    ("torch._inductor.fx_passes.reinplace", "inplaceable_ops"),
    ("torch._inductor.lowering", "needs_realized_inputs"),
    ("torch._inductor.lowering", "_maybe_layout_constraints"),
    ("torch._inductor.decomposition", "decompositions"),
    ("torch._decomp", "decomposition_table"),
    ("torch._decomp", "pre_autograd_decomposition_table"),
    ("torch._decomp", "meta_table"),
    ("torch.fx.node", "_side_effectful_functions"),
    ("torch.utils.flop_counter", "flop_registry"),
)
# PyTorch's functions with an `lru_cache` whose keys contain OpOverload objects. An `lru_cache`
# cannot drop a single entry, so it is cleared as a whole.
_FUNCTIONS = (
    ("torch._subclasses.fake_tensor", "get_schema_info"),
    ("torch._subclasses.functional_tensor", "_can_decompose_fast"),
    ("torch.utils._python_dispatch", "get_alias_info"),
    ("torch._functorch._aot_autograd.runtime_wrappers", "_is_fsdp_all_gather_copy_in"),
)


def forget_entry(qualname: str) -> None:
    """Reset an operator's effect in torch.library's registry, and remove the entry if it is empty.

    An effect makes PyTorch preserve the operator's calls and their order. If another library has
    registered a rule for the operator, such as a fake kernel, the entry is not empty, and the rule
    stays registered, just as that library's kernels stay in the dispatcher.
    """
    entry = _rules_registry._data.get(qualname)
    if entry is not None:
        entry.effect.register(None)
        if _contents(entry) == _contents(SimpleOperatorEntry(qualname)):
            _rules_registry._data.pop(qualname, None)


def _contents(entry: SimpleOperatorEntry) -> Mapping[str, Any]:
    return {
        name: vars(holder) if hasattr(holder, "__dict__") else holder
        for name, holder in vars(entry).items()
    }


def forget_objects(ops: Collection[Any]) -> None:
    """Remove overloads and packets from PyTorch's caches."""
    for collection in filter(None, (_loaded(*place) for place in _BY_OBJECT)):
        remove = collection.discard if hasattr(collection, "discard") else collection.pop
        for op in ops:
            if op in collection:
                remove(op)
    cache = getattr(_loaded("torch._subclasses.fake_tensor", "FakeTensorMode"), "cache", {})
    identities = set(map(id, ops))
    for key in list(cache):
        called = key.key[0]
        # Each key of FakeTensorMode's cache describes one call. A higher-order operator may receive
        # the overload as any of its arguments, so check all parts of the key. For other calls,
        # check only the called operator: this is enough, and faster for a large cache.
        parts = (called,) if isinstance(called, OpOverload) else key.key
        if not identities.isdisjoint(map(id, parts)):
            cache.pop(key, None)
    for function in filter(None, (_loaded(*place) for place in _FUNCTIONS)):
        function.cache_clear()


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
