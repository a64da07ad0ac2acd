"""Deregister operators: make their objects in `torch.ops` raise, and clear PyTorch's caches.

Workaround for pytorch/pytorch#98537, #98541 and #125234: calling the OpOverload of an operator that
has been deregistered reads freed memory. So before torchop deregisters an operator, it makes the
OpOverload and the OpOverloadPacket call functions that raise an error, in place of PyTorch's C++
functions. pytorch/pytorch#197025 fixes this for the overloads of `torch.library.custom_op`, which
PyTorch dispatches in Python.

Some of PyTorch's caches are keyed by operator name, so a stale entry would affect the next operator
of that name. Others are keyed by overload or packet, and would keep these objects alive forever.
This module removes a deregistered operator's entries from both kinds of caches.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch._library.simple_registry import SimpleOperatorEntry
from torch._library.simple_registry import singleton as _rules_registry
from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

from torchop import _hooks
from torchop._compat import dtensor, operators, torch_ops
from torchop._compat.classes import OpOverload, OpOverloadPacket

Name: TypeAlias = tuple[str, str, str]  # an operator's namespace, name and overload
lock: Any = threading.RLock()  # the registration lock; `_core.lock` sets this variable


def _invalidate_overload(
    namespace: str, name: str, overload: str, reason: Callable[[], str]
) -> Iterator[Any]:
    """Make an overload and its packet raise when called, before the operator is deregistered.

    Otherwise a later call, for example from a compiled graph, would read freed memory. Yields each
    overload object that was invalidated.
    """
    packet = torch_ops.existing_packet(namespace, name)
    # Leave the overload in the packet. If it were deleted, looking it up in a packet that is still
    # referenced would create a new overload object, which would never be invalidated.
    existing = None if packet is None else vars(packet).get(overload or "default")
    cached = _cached.get((namespace, name, overload), [])
    if existing is not None and existing not in cached:
        cached = _cached[namespace, name, overload] = [*cached, existing]
    for each in cached:
        if not torch_ops.is_deregistered(each):
            _invalidate(each, reason)
            yield each
    if packet is not None and not torch_ops.is_deregistered(packet):
        raising_packet = torch_ops.RaisingPacketFunction(
            hash(packet), reason, f"{namespace}::{name}"
        )
        raising_packet.__module__ = packet._op.__module__
        torch_ops.replace_function(packet, raising_packet)


def _invalidate(existing: Any, reason: Callable[[], str]) -> None:
    raising = torch_ops.RaisingFunction(hash(existing), reason)
    if vars(existing).get("_pyobj_dispatcher") is not None:
        existing._pyobj_dispatcher = None
    # Replace `_op` last. `is_deregistered` checks only `_op`, so by the time it returns True, all
    # other attributes must have been replaced.
    for attribute in ("_op_dk", "_cpp_dispatch_handle", "_handle", "_op"):
        if attribute in vars(existing) or attribute == "_handle":
            vars(existing)[attribute] = raising


# Overload objects of deregistered operators that the dispatcher may still use. If another library
# has registered a kernel for an operator, the dispatcher's record of the operator (OperatorEntry)
# survives the deregistration. The record holds a borrowed reference to the overload object that the
# dispatcher passes to dispatch modes (`getPythonOp` in ATen/core/dispatch/OperatorEntry.h). So this
# object must stay alive, and the next operator of the same name must reuse it.
_cached: dict[tuple[str, str, str], list[Any]] = {}

# The names (`namespace::name`) of all operators that were defined through torchop.
defined: set[str] = set()


def before_definition(namespace: str, name: str, overload: str) -> None:
    """Remove everything that PyTorch and torchop cached for an earlier operator of this name."""
    defined.add(f"{namespace}::{name}")
    # FX caches signatures by operator name, but the new operator may have a different signature.
    _SCHEMA_TO_SIGNATURE_CACHE.pop((f"{namespace}::{name}", overload), None)
    if (key := (namespace, name, overload)) in _cached and not operators.has_entry(*key):
        del _cached[key]


def after_definition(namespace: str, name: str, overload: str) -> None:
    """Update a new operator's packet, and reuse the overload object that the dispatcher holds."""
    torch_ops.refresh_packet(namespace, name, _hooks.extension.Operator)
    cached = _cached.get((namespace, name, overload))
    if not cached:
        return
    first = cached[0]
    current: Any = torch_ops.lookup_overload(namespace, name, overload)
    if current is first:
        return
    attributes: dict[str, Any] = vars(first)
    # PyTorch has created `current` for the new operator, but the dispatcher may still use `first`.
    # So turn `first` into an overload of the new operator too, with the same kernel tables. Update
    # all attributes in one step, so that no other thread sees the new function with the old schema.
    first.__class__ = type(current)
    attributes.update(vars(current))
    for attribute in attributes.keys() - vars(current).keys():
        del attributes[attribute]
    vars(current._overloadpacket)[overload or "default"] = first
    # Another thread may have read `current` from `torch.ops` before it was replaced with `first`.
    # Add `current` to `cached`, so that both objects are invalidated when the new operator is
    # deregistered.
    cached[1:] = [current]


@contextlib.contextmanager
def preserve_packet(namespace: str, name: str) -> Iterator[None]:
    """Keep a packet in `torch.ops` while its operator is being replaced.

    If the packet were removed, a lookup in another thread could create a second packet and
    overload, which would never be invalidated.
    """
    packet = f"{namespace}::{name}"
    with lock:
        _replaced[packet] += 1
    try:
        yield
    finally:
        with lock:
            _replaced[packet] -= 1
            if _replaced[packet] == 0:
                del _replaced[packet]
            _clear_packet(namespace, name)


def invalidate(names: Collection[Name], reason: Callable[[str], str]) -> None:
    """Make new calls to operators raise, before the operators are deregistered.

    `reason(name)` returns the error message for an operator.
    """
    for name in names:
        with contextlib.suppress(AttributeError):
            # Create the overload object now so that it can be invalidated. If `torch.ops` created
            # it later, calls to it would not raise.
            torch_ops.lookup_overload(*name)
    invalidate_existing(names, reason)


def invalidate_existing(names: Collection[Name], reason: Callable[[str], str]) -> None:
    """Like `invalidate`, but only for overload objects that `torch.ops` has already created."""
    invalidated: list[Any] = []
    for name in names:
        invalidated += _invalidate_overload(
            *name, functools.partial(reason, operators.joined(*name))
        )
    if invalidated:
        forget_objects(invalidated)


def forget(names: Iterable[Name]) -> None:
    for namespace, name, overload in names:
        packet = torch_ops.existing_packet(namespace, name)
        if packet is not None and not operators.overload_names(f"{namespace}::{name}"):
            forget_objects([packet])
        _clear_packet(namespace, name)
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

    The extension keeps the memory of a running call alive. Without it, PyTorch would free memory
    that the call still reads.
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

# The number of running calls of `preserve_packet` for each packet
_replaced: collections.Counter[str] = collections.Counter()


def _clear_packet(namespace: str, name: str) -> None:
    """Remove a packet from `torch.ops` if its last overload was deregistered.

    The packet stays if its operator is being replaced. If the packet was invalidated but has an
    overload again, make it call the overload.
    """
    qualname = f"{namespace}::{name}"
    packet = torch_ops.existing_packet(namespace, name)
    if packet is None or qualname in _replaced:
        return
    if not operators.overload_names(qualname):
        packets = getattr(torch.ops, namespace)
        if name in packets._dir:
            packets._dir.remove(name)
        delattr(packets, name)
    elif torch_ops.is_deregistered(packet):
        torch_ops.refresh(packet, _hooks.extension.Operator)


# PyTorch's sets and dictionaries that are keyed by OpOverload or OpOverloadPacket objects, each
# given as the name of a module and of a variable in the module.
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
        # Each key of FakeTensorMode's cache describes a call. In a call to a higher-order operator,
        # any argument may be the overload. For all other calls, it is enough to check which
        # operator was called, and this is faster because the cache is large.
        parts = (called,) if isinstance(called, OpOverload) else key.key
        if not identities.isdisjoint(map(id, parts)):
            cache.pop(key, None)
    for function in filter(None, (_loaded(*place) for place in _FUNCTIONS)):
        function.cache_clear()


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
