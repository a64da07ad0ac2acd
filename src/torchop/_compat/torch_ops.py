"""Look up and replace the namespaces, packets and overloads in `torch.ops`.

A packet (OpOverloadPacket) contains all overloads (OpOverload) of an operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import _OpNamespace

from torchop._compat.classes import OpOverload, OpOverloadPacket
from torchop._errors import OperatorGoneError

OpNamespace = _OpNamespace
# Reserved names. An operator or namespace of this name would be unreachable, because `torch.ops` or
# a namespace already has an attribute of this name.
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


def refresh_packet(namespace: str, name: str, operator: Any) -> None:
    packet = existing_packet(namespace, name)
    if packet is not None:
        attributes = vars(packet)
        for name, value in list(attributes.items()):
            if isinstance(value, OpOverload) and is_deregistered(value):
                del attributes[name]
        refresh(packet, operator)


def refresh(packet: OpOverloadPacket, operator: Any) -> None:
    """Update a packet's function and overload names from the dispatcher.

    `operator` is the class `Operator` of torchop's C++ extension, or None if the extension is not
    loaded. FlopCounterMode's registry is keyed by packets, and the hash of a packet is the hash of
    the function in `_op`, so the packet's FLOP formula would be lost if the hash changed. The class
    `Operator` preserves the hash. Without it, remove the packet from the registry before the hash
    changes, and insert it again afterwards.
    """
    counter = None if operator else sys.modules.get("torch.utils.flop_counter")
    formula = None if counter is None else counter.flop_registry.pop(packet, None)
    try:
        op, packet._overload_names = torch._C._jit_get_operation(packet._qualified_op_name)
        op.__module__ = packet._op.__module__
        replace_function(packet, op if operator is None else operator(packet, None, op))
    finally:
        if formula is not None:
            cast(Any, counter).flop_registry[packet] = formula


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

    def __init__(self, original_hash: int, reason: Callable[[], str]) -> None:
        self._hash = original_hash
        self._reason = reason

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise OperatorGoneError(self._reason())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class RaisingPacketFunction(RaisingFunction):
    """The function of a packet whose operator was deregistered.

    If a new operator of the same name is registered, this function calls it. Otherwise it raises
    OperatorGoneError.
    """

    def __init__(self, original_hash: int, reason: Callable[[], str], qualname: str) -> None:
        super().__init__(original_hash, reason)
        self._qualname = qualname

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        namespace, _, name = self._qualname.partition("::")
        packet: Any = getattr(getattr(torch.ops, namespace), name, None)
        function = getattr(packet, "_op", None)
        calls = (function, getattr(function, "dispatch", None))
        # Raise if no operator of this name is registered. Also raise if the packet still has this
        # function, since this means that PyTorch deregistered the operator without notifying
        # torchop.
        if function in (None, self) or any(getattr(each, "next", None) is self for each in calls):
            return super().__call__(*args, **kwargs)
        return packet(*args, **kwargs)
