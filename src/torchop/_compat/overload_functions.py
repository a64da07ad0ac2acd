"""Read and replace `_op`: the C++ function that an overload or packet calls."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from torchop._compat import torch_ops
from torchop._compat.classes import OpOverload, OpOverloadPacket


def replace_function(overload: OpOverload, operator: Any, entry: Any) -> Callable[..., Any]:
    """Make an overload and its packet call a native entry, and return the previous function.

    Replaces only C++ functions. A Python function, such as a user's hook, is left in place.
    """
    function = overload._op
    if is_cpp_function(function):
        overload._op = operator(overload, entry, function)
        follow_overloads(overload._overloadpacket, operator)
    return function


def is_cpp_function(function: Any) -> bool:
    """Return whether a function is PyTorch's, possibly wrapped by us to count calls."""
    is_counted = getattr(function, "entry", function) is None
    # In 2.15, `_op` of overloads is an instance of a class in torch._C.
    is_pytorchs = type(function).__module__ == "torch._C"
    return is_counted or is_pytorchs or isinstance(function, BuiltinFunctionType)


# In these namespaces, PyTorch accepts numbers as tensors (`opAllowsNumbersAsTensors` in
# torch/csrc/jit/python/init.cpp). So if a native entry rejects a number, PyTorch may still select
# this overload.
_NUMBERS_AS_TENSORS = frozenset({"aten", "prims", "nvprims"})


def follow_overloads(packet: OpOverloadPacket, operator: Any) -> None:
    """Make a packet try native calls to its overloads, in the order in which PyTorch tries them.

    At the first overload that has no native entry, PyTorch's function takes over and tries the
    rest.
    """
    function: Any = packet._op
    while isinstance(function, operator):
        function = function.dispatch
    # A packet with TorchScript class arguments resolves the overload on each call.
    takes_classes = getattr(packet, "_has_torchbind_op_overload", False)
    takes_numbers = packet._qualified_op_name.partition("::")[0] in _NUMBERS_AS_TENSORS
    if takes_classes or takes_numbers or not is_cpp_function(function):
        return
    functions = [getattr(vars(packet).get(name), "_op", None) for name in packet.overloads()]
    entries = [each.entry if isinstance(each, operator) else None for each in functions]
    # A packet hashes as its function, and its hash must not change: `counted` preserves it.
    if any(entries) or hash(function) != hash(packet):
        function = torch_ops.counted(packet, function, operator)
    chain = None  # native functions of the leading overloads, each linked to the next
    for entry in reversed(entries):
        chain = operator(packet, entry, function, chain) if entry else None
    torch_ops.replace_function(packet, function if chain is None else chain)


def replaced_function(overload: OpOverload) -> Any:
    """Return the function that an overload currently calls."""
    return overload._op


# The names in the code of `__call__` of the torch.ops classes, on releases where it only forwards
# to `self._op` (for operators without TorchScript classes). Since 2.14, calls that skip torch
# functions use `_cpp_dispatch_handle`; the extension does the same.
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
    """Return the torch.ops classes whose `__call__` does nothing but forward to `_op`.

    Excludes classes whose `__call__` was monkeypatched, or changed by a newer PyTorch.
    """
    return [
        cls
        for cls, names in _FORWARDING_CALLS.items()
        if getattr(getattr(vars(cls)["__call__"], "__code__", None), "co_names", None) in names
    ]
