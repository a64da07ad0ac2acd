"""Look up the packets and overloads in `torch.ops`, and make them raise once deregistered.

A packet (OpOverloadPacket) contains all overloads (OpOverload) of an operator.

Workaround for pytorch/pytorch#98537, #98541 and #125234: calling the OpOverload of an operator that
has been deregistered reads freed memory. So before torchop deregisters an operator, it makes the
OpOverload and the OpOverloadPacket call functions that raise an error, in place of PyTorch's C++
functions. pytorch/pytorch#197025 fixes this for the overloads of `torch.library.custom_op`, which
PyTorch dispatches in Python.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch._ops import _OpNamespace
from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

from torchop import _hooks
from torchop._compat import caches, dtensor, operators
from torchop._compat.classes import OpOverload, OpOverloadPacket
from torchop._errors import OperatorGoneError

Name: TypeAlias = tuple[str, str, str]  # an operator's namespace, name and overload
OpNamespace = _OpNamespace
# Reserved names. `torch.ops` or a namespace in it already has an attribute with each of these
# names, so an operator or namespace of the same name would be unreachable.
OPS_ATTRIBUTES = frozenset(dir(type(torch.ops))) | {
    "_dir",
    "_higher_order_op_namespace",
    "loaded_libraries",
}
NAMESPACE_ATTRIBUTES = frozenset(dir(_OpNamespace)) | set(vars(_OpNamespace("torchop")))
# The attributes of a packet that are not overloads.
PACKET_ATTRIBUTES = frozenset(dir(OpOverloadPacket)) | {
    name for name in vars(torch.ops.aten.sin) if name.startswith("_")
}


def lookup_overload(namespace: str, name: str, overload: str) -> OpOverload:
    """Return an operator's OpOverload, or raise AttributeError if the operator is not defined."""
    packet = getattr(getattr(torch.ops, namespace), name)
    return cast(OpOverload, getattr(packet, overload or "default"))


def existing_overload(namespace: str, name: str, overload: str) -> Any | None:
    """Return an operator's OpOverload if `torch.ops` has already created it, otherwise None."""
    packet = existing_packet(namespace, name)
    existing = None if packet is None else vars(packet).get(overload or "default")
    return None if existing is None or is_deregistered(existing) else existing


def live_overload(namespace: str, name: str, overload: str) -> OpOverload | None:
    """Return an operator's OpOverload, or None if the operator is no longer defined."""
    try:
        op = lookup_overload(namespace, name, overload)
    except AttributeError:
        return None
    return None if is_deregistered(op) else op


def other_overloads(overload: OpOverload) -> list[str]:
    names = overload._overloadpacket.overloads()
    return ["" if n == "default" else n for n in names if n != overload._overloadname]


def replace_function(packet: OpOverloadPacket, function: Any) -> None:
    """Replace a packet's function, including in TorchScript's table of builtin functions."""
    torch.jit._builtins._get_builtin_table().pop(id(packet._op), None)
    if not isinstance(function, RaisingFunction):
        torch.jit._builtins._register_builtin(function, packet._qualified_op_name)
    packet._op = function


def existing_packet(namespace: str, name: str) -> Any | None:
    # `getattr` would create the packet.
    operators = vars(torch.ops).get(namespace)
    return None if operators is None else vars(operators).get(name)


def is_deregistered(op: OpOverload | OpOverloadPacket) -> bool:
    return isinstance(vars(op).get("_op"), RaisingFunction)


class RaisingFunction:
    """The function of a deregistered operator, which raises OperatorGoneError when called."""

    def __init__(self, original_hash: int, reason: str) -> None:
        self._hash = original_hash
        self._reason = reason

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise OperatorGoneError(self._reason)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class RaisingPacketFunction(RaisingFunction):
    """The function of a packet (OpOverloadPacket) whose operator was deregistered.

    If a new operator of the same name is registered, this function calls it. Otherwise it raises
    OperatorGoneError.
    """

    def __init__(self, original_hash: int, reason: str, qualname: str) -> None:
        super().__init__(original_hash, reason)
        self._qualname = qualname

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        namespace, _, name = self._qualname.partition("::")
        packet: Any = getattr(getattr(torch.ops, namespace), name, None)
        function = getattr(packet, "_op", None)
        calls = (function, getattr(function, "dispatch", None))
        # Raise if no operator of this name is registered. Also raise if the packet
        # (OpOverloadPacket) still has this function, since this means that PyTorch deregistered the
        # operator without notifying torchop.
        if function in (None, self) or any(getattr(each, "next", None) is self for each in calls):
            return super().__call__(*args, **kwargs)
        return packet(*args, **kwargs)


def overload_names(qualname: str) -> list[str]:
    _, names = torch._C._jit_get_operation(qualname)
    return list(names or ())


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


# The names (`namespace::name`) of all operators that were defined through torchop.
defined: set[str] = set()
# Overload objects of deregistered operators that the dispatcher may still use. If another library
# has registered a kernel for an operator, the dispatcher's record of the operator (OperatorEntry)
# survives the deregistration. The record holds a borrowed reference to the overload object that the
# dispatcher passes to dispatch modes (`getPythonOp` in ATen/core/dispatch/OperatorEntry.h). So this
# object must stay alive, and the next operator of the same name must reuse it.
cached_overloads: dict[tuple[str, str, str], list[Any]] = {}


def invalidate(reasons: Mapping[Name, str], *, only_existing: bool = False) -> None:
    """Make operators raise when called, before they are deregistered.

    Otherwise a later call, for example from a compiled graph, would read freed memory. `reasons`
    maps the operators to error messages. `torch.ops` creates overload objects on first access. By
    default, this function creates the missing ones, so that they will raise too. With
    `only_existing`, it skips them.

    Raises:
        RuntimeError: see `refuse_running`. With `only_existing`, the library is already being
            destroyed, so this is not checked.
    """
    if not only_existing:
        refuse_running(reasons)
    invalidated: list[OpOverload] = []
    for name, reason in reasons.items():
        if not only_existing:
            with contextlib.suppress(AttributeError):
                # Create the overload object now, so that it can be made to raise. If `torch.ops`
                # created it later, a call to it would read freed memory.
                lookup_overload(*name)
        invalidated += _invalidate_overload(*name, reason)
    if invalidated:
        caches.forget_objects(invalidated)


def _invalidate_overload(namespace: str, name: str, overload: str, reason: str) -> list[OpOverload]:
    """Make an operator's packet and overload objects raise, and return the overload objects."""
    packet = existing_packet(namespace, name)
    # Leave the overload in the packet. Otherwise, code that still holds the packet could look up
    # the overload, which would create a new overload object that does not raise.
    existing = None if packet is None else vars(packet).get(overload or "default")
    cached = cached_overloads.get((namespace, name, overload), [])
    if existing is not None and existing not in cached:
        cached = cached_overloads[namespace, name, overload] = [*cached, existing]
    alive = [each for each in cached if not is_deregistered(each)]
    for each in alive:
        _invalidate(each, reason)
    if packet is not None and not is_deregistered(packet):
        raising_packet = RaisingPacketFunction(hash(packet), reason, f"{namespace}::{name}")
        raising_packet.__module__ = packet._op.__module__
        replace_function(packet, raising_packet)
    return alive


def _invalidate(existing: Any, reason: str) -> None:
    raising = RaisingFunction(hash(existing), reason)
    if vars(existing).get("_pyobj_dispatcher") is not None:
        existing._pyobj_dispatcher = None
    # Replace `_op` last. `is_deregistered` checks only `_op`, so by the time it returns True, all
    # other attributes must have been replaced.
    for attribute in ("_op_dk", "_cpp_dispatch_handle", "_handle", "_op"):
        if attribute in vars(existing) or attribute == "_handle":
            vars(existing)[attribute] = raising


def forget(names: Iterable[Name]) -> None:
    for namespace, name, overload in names:
        packet = existing_packet(namespace, name)
        if packet is not None and not overload_names(f"{namespace}::{name}"):
            caches.forget_objects([packet])
        clear_packet(namespace, name)
        before_definition(namespace, name, overload)
        caches.forget_entry(operators.joined(namespace, name, overload))
    if dtensor.is_imported():
        # The keys of DTensor's C++ cache (`NativeShardingPropagatorCache` in
        # torch/csrc/autograd/python_variable.cpp) contain the addresses of operators. A new
        # operator may get the address of a deregistered one and would then hit its stale entries,
        # so clear the cache.
        dtensor.clear_caches()


@contextlib.contextmanager
def preserve_packet(namespace: str, name: str) -> Iterator[None]:
    """Keep a packet in `torch.ops` while its operator is being replaced.

    If the packet were removed, a lookup in another thread could create a second packet and overload
    for the old operator, and nothing would make them raise after the operator is deregistered. The
    caller must hold the registration lock.
    """
    packet = f"{namespace}::{name}"
    _replaced.add(packet)
    try:
        yield
    finally:
        _replaced.discard(packet)
        clear_packet(namespace, name)


# The names of the packets that `preserve_packet` keeps.
_replaced: set[str] = set()


def clear_packet(namespace: str, name: str) -> None:
    """Remove a packet from `torch.ops` if its last overload was deregistered.

    The packet stays in `torch.ops` if its operator is being replaced. If the packet already raises,
    but the operator has an overload again, make the packet call that overload.
    """
    qualname = f"{namespace}::{name}"
    packet = existing_packet(namespace, name)
    if packet is None or qualname in _replaced:
        return
    if not overload_names(qualname):
        packets = getattr(torch.ops, namespace)
        if name in packets._dir:
            packets._dir.remove(name)
        delattr(packets, name)
    elif is_deregistered(packet):
        _refresh(packet)


def before_definition(namespace: str, name: str, overload: str) -> None:
    """Remove everything that PyTorch and torchop cached for an earlier operator of this name."""
    defined.add(f"{namespace}::{name}")
    # FX caches signatures by operator name, but the new operator may have a different signature.
    _SCHEMA_TO_SIGNATURE_CACHE.pop((f"{namespace}::{name}", overload), None)
    key = (namespace, name, overload)
    if key in cached_overloads and not operators.has_entry(*key):
        del cached_overloads[key]


def after_definition(namespace: str, name: str, overload: str) -> None:
    """Update a new operator's packet, and reuse the overload object that the dispatcher holds."""
    packet = existing_packet(namespace, name)
    if packet is not None:
        attributes = vars(packet)
        for attribute, value in list(attributes.items()):
            if isinstance(value, OpOverload) and is_deregistered(value):
                del attributes[attribute]
        _refresh(packet)
    cached = cached_overloads.get((namespace, name, overload))
    if not cached:
        return
    first = cached[0]
    current: Any = lookup_overload(namespace, name, overload)
    if current is first:
        return
    attributes = vars(first)
    # PyTorch has created `current` for the new operator, but the dispatcher may still use `first`.
    # So turn `first` into an overload of the new operator too, with the same kernel tables. Update
    # all attributes in one step, so that no other thread sees the new function with the old schema.
    first.__class__ = type(current)
    attributes.update(vars(current))
    for attribute in attributes.keys() - vars(current).keys():
        del attributes[attribute]
    vars(current._overloadpacket)[overload or "default"] = first
    # Another thread may have read `current` from `torch.ops` before it was replaced with `first`.
    # Add `current` to `cached`, so that both objects raise once the new operator is deregistered.
    cached[1:] = [current]


def _refresh(packet: OpOverloadPacket) -> None:
    """Update a packet's function and overload names from the dispatcher.

    FlopCounterMode's registry is keyed by packets, and the hash of a packet is the hash of the
    function in `_op`, so the packet's FLOP formula would be lost if the hash changed. The class
    `Operator` of torchop's C++ extension preserves the hash. Without the extension, remove the
    packet from the registry before the hash changes, and insert it again afterwards.
    """
    operator = _hooks.extension.Operator
    counter: Any = None if operator else sys.modules.get("torch.utils.flop_counter")
    formula = None if counter is None else counter.flop_registry.pop(packet, None)
    try:
        op, packet._overload_names = torch._C._jit_get_operation(packet._qualified_op_name)
        op.__module__ = packet._op.__module__
        function = op if operator is None else operator(packet, None, op)
        replace_function(packet, function)
    finally:
        if formula is not None:
            counter.flop_registry[packet] = formula
