"""Invalidate operators before they are deregistered, and clear PyTorch's caches afterwards.

Some of PyTorch's caches are keyed by operator name, so a stale entry would affect the next operator
of that name. Others are keyed by overload or packet, and would keep these objects alive forever.
This module removes a deregistered operator's entries from both kinds of caches.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

from torch._library.simple_registry import SimpleOperatorEntry
from torch._library.simple_registry import singleton as _rules_registry
from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

from torchop import _hooks
from torchop._compat import dtensor, operators, torch_ops
from torchop._compat.classes import OpOverload, OpOverloadPacket

Name: TypeAlias = tuple[str, str, str]  # an operator's namespace, name and overload

# The names (`namespace::name`) of all operators that were defined through torchop.
defined: set[str] = set()


def before_definition(namespace: str, name: str, overload: str) -> None:
    """Remove everything that PyTorch and torchop cached for an earlier operator of this name."""
    defined.add(f"{namespace}::{name}")
    # FX caches signatures by operator name, but the new operator may have a different signature.
    _SCHEMA_TO_SIGNATURE_CACHE.pop((f"{namespace}::{name}", overload), None)
    key = (namespace, name, overload)
    if key in torch_ops.cached_overloads and not operators.has_entry(*key):
        del torch_ops.cached_overloads[key]


def invalidate(
    names: Iterable[Name], reason: Callable[[str], str], *, only_existing: bool = False
) -> None:
    """Make new calls to operators raise, before the operators are deregistered.

    `reason(name)` returns the error message for an operator. By default, overload objects that
    `torch.ops` has not created yet are created first, so that they can be invalidated too. With
    `only_existing`, they are skipped.
    """
    invalidated: list[Any] = []
    for name in names:
        reason_of_name = functools.partial(reason, operators.joined(*name))
        invalidated += torch_ops.invalidate_overload(*name, reason_of_name, only_existing)
    if invalidated:
        forget_objects(invalidated)


def forget(names: Iterable[Name]) -> None:
    for namespace, name, overload in names:
        packet = torch_ops.existing_packet(namespace, name)
        if packet is not None and not torch_ops.overload_names(f"{namespace}::{name}"):
            forget_objects([packet])
        torch_ops.clear_packet(namespace, name)
        before_definition(namespace, name, overload)
        forget_entry(namespace, name, overload)
    if dtensor.is_imported():
        # The keys of DTensor's C++ cache (`NativeShardingPropagatorCache` in
        # torch/csrc/autograd/python_variable.cpp) contain the addresses of operators. A new
        # operator may get the address of a deregistered one and would then hit its stale entries,
        # so clear the cache.
        dtensor.clear_caches()


def refuse_running(names: Iterable[Name]) -> None:
    """Raise if this thread is inside a call to an operator and the extension is not loaded.

    torchop's C++ extension keeps the memory of a running call alive. Without the extension, PyTorch
    would free memory that the call still reads.
    """
    if _hooks.extension.Operator is not None:
        return
    for operator in _called_here() & {f"{namespace}::{name}" for namespace, name, _ in names}:
        raise RuntimeError(
            f"{operator} cannot be deregistered or replaced from inside a call to it, because "
            "torchop's C++ extension is not loaded. Wait until the call has returned."
        )


def _called_here() -> set[str]:
    names = set()
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_filename == _OPS_FILE:
            subject = frame.f_locals.get("self")
            if isinstance(subject, OpOverload):
                names.add(str(subject._schema.name))
            elif isinstance(subject, OpOverloadPacket):
                names.add(str(subject._qualified_op_name))
    return names


_OPS_FILE = OpOverload.__call__.__code__.co_filename

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


def forget_entry(namespace: str, name: str, overload: str) -> None:
    """Reset an operator's effect in torch.library's registry, and remove the entry if it is empty.

    An effect makes PyTorch preserve the operator's calls and their order. The entry is not empty if
    another library has registered rules for the operator. Those rules stay, just as that library's
    kernels stay in the dispatcher.
    """
    qualname = operators.joined(namespace, name, overload)
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
        # Each key of FakeTensorMode's cache describes one call. Higher-order operators may receive
        # the overload as any argument, so check all parts of their keys. For other calls, it is
        # enough to check the called operator, which is faster because the cache is large.
        parts = (called,) if isinstance(called, OpOverload) else key.key
        if not identities.isdisjoint(map(id, parts)):
            cache.pop(key, None)
    for function in filter(None, (_loaded(*place) for place in _FUNCTIONS)):
        function.cache_clear()


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
