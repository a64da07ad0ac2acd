"""The C++ functions that objects of `torch.ops` call, and replacing them."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from torchop._compat import torch_ops
from torchop._compat.classes import OpOverload, OpOverloadPacket


def replace_function(overload: OpOverload, operator: Any, entry: Any) -> Callable[..., Any]:
    """Makes an overload, and its packet, call an entry of the native call path.

    An object of the class `operator` replaces the C++ function; a Python function that somebody has
    put there, such as one that observes calls, stays. Returns what the overload called before.
    """
    function = overload._op
    if is_cpp_function(function):
        overload._op = operator(overload, entry, function)
        follow_overloads(overload._overloadpacket, operator)
    return function


def is_cpp_function(function: Any) -> bool:
    """Whether PyTorch made this function for an object of `torch.ops`; its calls may be counted."""
    is_counted = getattr(function, "entry", function) is None
    # In 2.15, an overload has an object of a class of its own.
    is_pytorchs = type(function).__module__ == "torch._C"
    return is_counted or is_pytorchs or isinstance(function, BuiltinFunctionType)


# The namespaces in which PyTorch takes a number for a tensor. There, a plan that refuses a number
# does not show that PyTorch would try the next overload.
_NUMBERS_AS_TENSORS = frozenset({"aten", "prims", "nvprims"})


def follow_overloads(packet: OpOverloadPacket, operator: Any) -> None:
    """Makes a packet call its overloads natively, in the order in which PyTorch tries them.

    From the first overload that is not native, the packet's C++ function chooses.
    """
    function: Any = packet._op
    while isinstance(function, operator):
        function = function.dispatch
    # With a TorchScript class among the arguments, the packet decides on each call.
    takes_classes = getattr(packet, "_has_torchbind_op_overload", False)
    takes_numbers = packet._qualified_op_name.partition("::")[0] in _NUMBERS_AS_TENSORS
    if takes_classes or takes_numbers or not is_cpp_function(function):
        return
    functions = [getattr(vars(packet).get(name), "_op", None) for name in packet.overloads()]
    entries = [each.entry if isinstance(each, operator) else None for each in functions]
    # Its function may be newer than the one by whose hash the packet is found.
    if any(entries) or hash(function) != hash(packet):
        function = torch_ops.counted(packet, function, operator)
    chain = None  # the native functions of the first overloads, each with the next
    for entry in reversed(entries):
        chain = operator(packet, entry, function, chain) if entry else None
    torch_ops.replace_function(packet, function if chain is None else chain)


def replaced_function(overload: OpOverload) -> Any:
    """The function that an overload calls: PyTorch's in C++, or what replaced it."""
    return overload._op


# What `__call__` of the classes of torch.ops looks up, where all it does for an operator without
# TorchScript classes is `self._op(*args, **kwargs)`. Since 2.14, it may call another function for a
# call that skips torch functions; those the extension hands over.
_FORWARDING_CALLS: dict[type, tuple[tuple[str, ...], ...]] = {
    OpOverload: (
        ("_op",),
        (
            "_pyobj_dispatcher",
            "torch",
            "_C",
            "_peek_should_skip_torch_function",
            "_cpp_dispatch_handle",
            "_op",
        ),
    ),
    OpOverloadPacket: (
        (
            "_has_torchbind_op_overload",
            "_must_dispatch_in_python",
            "_call_overload_packet_from_python",
            "_op",
        ),
    ),
}


def forwarding_classes() -> list[type]:
    """The classes of torch.ops whose objects, when called, just call their `_op`.

    Not those that somebody has given another `__call__`, and none of a PyTorch that does more.
    """
    return [
        cls
        for cls, names in _FORWARDING_CALLS.items()
        if getattr(getattr(vars(cls)["__call__"], "__code__", None), "co_names", None) in names
    ]
