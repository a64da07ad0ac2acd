"""The objects of `torch.ops`: namespaces, packets and overloads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import _OpNamespace

from torchop._compat.classes import OpOverload, OpOverloadPacket
from torchop._errors import OperatorGoneError

OpNamespace = _OpNamespace
# Attributes of `torch.ops` and of its namespaces, which hide an operator of the same name.
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
    """The OpOverload that `torch.ops` holds, if anybody has looked it up."""
    packet = existing_packet(namespace, name)
    existing = None if packet is None else vars(packet).get(overload or "default")
    return None if existing is None or is_retired(existing) else existing


def live_overload(namespace: str, name: str, overload: str) -> OpOverload | None:
    """The OpOverload of an operator, created on the first look-up; None if it was destroyed."""
    try:
        op = lookup_overload(namespace, name, overload)
    except AttributeError:
        return None
    return None if is_retired(op) else op


def overloads_beside(overload: OpOverload) -> list[str]:
    """The names of the other overloads in a packet."""
    names = overload._overloadpacket.overloads()
    return ["" if n == "default" else n for n in names if n != overload._overloadname]


def refresh_packet(namespace: str, name: str, operator: Any) -> None:
    """Updates an existing packet in `torch.ops` after an overload was defined; see `refresh`."""
    packet = existing_packet(namespace, name)
    if packet is not None:
        attributes = vars(packet)
        for name, value in list(attributes.items()):
            if isinstance(value, OpOverload) and is_retired(value):
                del attributes[name]
        refresh(packet, operator)


def refresh(packet: OpOverloadPacket, operator: Any) -> None:
    """Updates the overloads of a packet, and keeps it in the registry of FLOP formulas.

    Where native calls are there, an object of the class `operator` counts its calls. It also keeps
    the hash, so the registry stays as it is for other threads.
    """
    counter = None if operator else sys.modules.get("torch.utils.flop_counter")
    formula = None if counter is None else counter.flop_registry.pop(packet, None)
    try:
        # Not PyTorch's `_refresh_packet`: a call might find the function before it is counted.
        op, packet._overload_names = torch._C._jit_get_operation(packet._qualified_op_name)
        op.__module__ = packet._op.__module__
        replace_function(packet, op if operator is None else counted(packet, op, operator))
    finally:
        if formula is not None:
            cast(Any, counter).flop_registry[packet] = formula


def counted(op: OpOverload | OpOverloadPacket, function: Any, operator: Any) -> Any:
    """A function of PyTorch's, in an object of the class `operator` that counts its calls.

    Another thread may end the operator meanwhile, or an overload of those among which it chooses.
    """
    if isinstance(op, OpOverload):
        return operator(op, None, function, Gone(hash(op), lambda: f"{op} is gone."), [op._name])
    name = op._qualified_op_name
    overloads = [f"{name}.{each}".removesuffix(".default") for each in op.overloads()]
    return operator(op, None, function, gone_packet(op), overloads)


def gone_packet(packet: OpOverloadPacket) -> GonePacket:
    """What a packet calls if one of its overloads ended."""
    name = packet._qualified_op_name
    return GonePacket(hash(packet), lambda: f"An overload of {name} is gone.", name)


def replace_function(packet: OpOverloadPacket, function: Any) -> None:
    """Makes a packet call a function, which TorchScript finds by its identity."""
    torch.jit._builtins._get_builtin_table().pop(id(packet._op), None)
    if not isinstance(function, Gone):
        torch.jit._builtins._register_builtin(function, packet._qualified_op_name)
    packet._op = function


def existing_packet(namespace: str, name: str) -> Any | None:
    """The packet that `torch.ops` holds, if anybody has looked it up."""
    # vars(), not getattr: a look-up would create the packet.
    operators = vars(torch.ops).get(namespace)
    return None if operators is None else vars(operators).get(name)


def is_retired(op: OpOverload | OpOverloadPacket) -> bool:
    """Whether the operator of an overload or packet was destroyed, or is about to be."""
    return isinstance(vars(op).get("_op"), Gone)


class Gone:
    """Replaces the C++ function of a destroyed operator, and raises when it is called."""

    def __init__(self, original_hash: int, reason: Callable[[], str]) -> None:
        self._hash = original_hash
        self._reason = reason

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise OperatorGoneError(self._reason())

    def _explain_refusal(self, error: RuntimeError) -> OperatorGoneError | None:
        # Native calls ask it, if an operator ended while PyTorch's function called it.
        ended = "schema_.has_value()" in str(error)
        return OperatorGoneError(self._reason()) if ended else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class GonePacket(Gone):
    """The same for a packet, which calls the operator that has its name now, if there is one."""

    def __init__(self, original_hash: int, reason: Callable[[], str], qualname: str) -> None:
        super().__init__(original_hash, reason)
        self._qualname = qualname

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        namespace, _, name = self._qualname.partition("::")
        packet: Any = getattr(getattr(torch.ops, namespace), name, None)
        function = getattr(packet, "_op", None)
        calls = (function, getattr(function, "dispatch", None))
        # Destroyed, or just about to be; or PyTorch destroyed an overload, and told nobody.
        if function in (None, self) or any(getattr(each, "next", None) is self for each in calls):
            return super().__call__(*args, **kwargs)
        return packet(*args, **kwargs)
