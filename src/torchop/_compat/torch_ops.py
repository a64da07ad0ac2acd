"""The objects of `torch.ops`: namespaces, packets and overloads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import _OpNamespace, _refresh_packet

from torchop._compat.classes import OpOverload, OpOverloadPacket
from torchop._errors import OperatorGoneError

# Names that these objects occupy, where an operator of that name could never be reached.
OPS_ATTRIBUTES = frozenset(dir(type(torch.ops))) | {
    "_dir",
    "_higher_order_op_namespace",
    "loaded_libraries",
}
NAMESPACE_ATTRIBUTES = frozenset(dir(_OpNamespace)) | set(vars(_OpNamespace("torchop")))
# The private attributes of a packet; the others are its overloads.
PACKET_ATTRIBUTES = frozenset(dir(OpOverloadPacket)) | {
    name for name in vars(torch.ops.aten.sin) if name.startswith("_")
}


def lookup_overload(namespace: str, name: str, overload: str) -> OpOverload:
    """The OpOverload of an operator; raises AttributeError if nobody defined it."""
    packet = getattr(getattr(torch.ops, namespace), name)
    return cast(OpOverload, getattr(packet, overload or "default"))


def existing_overload(namespace: str, name: str, overload: str) -> Any | None:
    """The OpOverload that `torch.ops` hands out at the moment, if anybody asked for it."""
    packet = existing_packet(namespace, name)
    held = None if packet is None else vars(packet).get(overload or "default")
    return None if held is None or is_retired(held) else held


def live_overload(namespace: str, name: str, overload: str) -> OpOverload | None:
    """The OpOverload of an operator, made if nobody asked for it before; None if it is gone."""
    try:
        held = lookup_overload(namespace, name, overload)
    except AttributeError:
        return None
    return None if is_retired(held) else held


def refresh_packet(namespace: str, name: str) -> None:
    """Makes an existing `torch.ops` packet see an overload that was just defined."""
    packet = existing_packet(namespace, name)
    if packet is not None:
        attributes = vars(packet)
        for overload, held in list(attributes.items()):
            if isinstance(held, OpOverload) and is_retired(held):
                del attributes[overload]
        refresh(packet)


def refresh(packet: OpOverloadPacket) -> None:
    """Makes a packet see its overloads anew, and stay in the registry of FLOP formulas."""
    counter = sys.modules.get("torch.utils.flop_counter")
    formula = None if counter is None else counter.flop_registry.pop(packet, None)
    _refresh_packet(packet)
    if formula is not None:
        cast(Any, counter).flop_registry[packet] = formula


def existing_packet(namespace: str, name: str) -> Any | None:
    """The packet that `torch.ops` hands out at the moment, if anybody asked for it."""
    # vars(), not getattr: looking an operator up would create what we only want to find.
    operators = vars(torch.ops).get(namespace)
    return None if operators is None else vars(operators).get(name)


def is_retired(op: OpOverload | OpOverloadPacket) -> bool:
    """Whether the operator behind an object of `torch.ops` was destroyed, or is about to be."""
    return isinstance(vars(op).get("_op"), Gone)


class Gone:
    """Stands where the C++ callable of a destroyed operator stood."""

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


class GonePacket(Gone):
    """A packet is a name: it finds the operator that has the name now, if there is one."""

    def __init__(
        self, original_hash: int, namespace: str, name: str, reason: Callable[[], str]
    ) -> None:
        super().__init__(original_hash, reason)
        self._namespace = namespace
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(getattr(torch.ops, self._namespace), self._name, None)
        if packet is None or packet._op is self:  # destroyed, or just about to be
            return super().__call__(*args, **kwargs)
        return packet(*args, **kwargs)
