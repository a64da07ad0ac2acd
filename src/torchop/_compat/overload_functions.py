"""Read and replace the attribute `_op` of overloads and packets: the C++ function that they call.

torchop replaces this function with an `Operator`, a class of torchop's C++ extension. If possible,
an `Operator` runs a kernel without the dispatcher (a native call). Otherwise it calls PyTorch's
function.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from torchop._compat import torch_ops
from torchop._compat.classes import OpOverload, OpOverloadPacket


def replace_function(overload: OpOverload, operator: Any, entry: Any) -> Callable[..., Any]:
    """Make an overload and its packet try a native call (one without the dispatcher) first.

    `operator` is the extension's class `Operator`, and `entry` is the C++ object that tries native
    calls. Returns the overload's previous function. A Python function, such as a user's hook, is
    not replaced.
    """
    stop_observing(overload)
    function = overload._op
    if is_cpp_function(function):
        overload._op = operator(overload, entry, function)
        follow_overloads(overload._overloadpacket, operator)
    return function


class ObservedFunction:
    """A wrapper that calls `observe()` before PyTorch's function of an overload or packet.

    If `observe` returns False, PyTorch's function is restored before the call.
    """

    def __init__(self, op: OpOverload | OpOverloadPacket, observe: Callable[[], bool]) -> None:
        self._op = op
        self._observe = observe
        self._function: Any = op._op
        # Preserve the hash. PyTorch uses overloads and packets as dictionary keys, and their hash
        # is the hash of this function.
        self._hash = hash(op)
        # `torch_ops._refresh` reads this attribute, which some functions lack in 2.15.
        self.__module__ = getattr(self._function, "__module__", __name__)

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._observe():
            self.stop()
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def stop(self) -> None:
        _replace(self._op, self, self._function)


def observe_calls(overload: OpOverload, observe: Callable[[], bool]) -> None:
    """Call `observe()` before each call to an overload or its packet, until it returns False.

    This is used for operators of other packages while the extension is not loaded. It is a no-op if
    other code has replaced PyTorch's function, for example with a hook.
    """
    for op in (overload, overload._overloadpacket):
        if is_cpp_function(op._op):
            _replace(op, op._op, ObservedFunction(op, observe))


def stop_observing(overload: OpOverload) -> None:
    for op in (overload, overload._overloadpacket):
        if isinstance(op._op, ObservedFunction):
            op._op.stop()


def _replace(op: OpOverload | OpOverloadPacket, expected: Any, function: Any) -> None:
    if op._op is not expected:
        return  # other code has replaced the function
    if isinstance(op, OpOverload):
        op._op = function
    else:
        torch_ops.replace_function(op, function)


def is_cpp_function(function: Any) -> bool:
    """Return whether a function is PyTorch's own, or torchop's wrapper with the same hash."""
    is_wrapped = getattr(function, "entry", function) is None
    # Since 2.15, the `_op` of an overload is an instance of a class in torch._C rather than a
    # builtin function.
    is_pytorchs = type(function).__module__ == "torch._C"
    return is_wrapped or is_pytorchs or isinstance(function, BuiltinFunctionType)


# Packets in these namespaces must not try native calls (without the dispatcher), because they could
# run the wrong overload. PyTorch accepts a number for an argument of type Tensor there
# (`opAllowsNumbersAsTensors` in torch/csrc/jit/python/init.cpp). But a native call rejects the
# number, so the packet would skip the overload that PyTorch selects and move on to the next.
_NUMBERS_AS_TENSORS = frozenset({"aten", "prims", "nvprims"})


def follow_overloads(packet: OpOverloadPacket, operator: Any) -> None:
    """Make a packet try native calls to its overloads, in the order in which PyTorch tries them.

    A native call skips the dispatcher. At the first overload without native calls, the packet falls
    back to PyTorch's function, which then selects the overload.
    """
    function: Any = packet._op
    while isinstance(function, operator):
        function = function.dispatch
    # If an overload takes TorchScript classes, PyTorch selects the overload in Python on each call,
    # so leave the packet unchanged.
    takes_classes = getattr(packet, "_has_torchbind_op_overload", False)
    takes_numbers = packet._qualified_op_name.partition("::")[0] in _NUMBERS_AS_TENSORS
    if takes_classes or takes_numbers or not is_cpp_function(function):
        return
    functions = [getattr(vars(packet).get(name), "_op", None) for name in packet.overloads()]
    entries = [each.entry if isinstance(each, operator) else None for each in functions]
    # The packet's hash must not change, because PyTorch uses packets as dictionary keys. The hash
    # is the hash of the packet's `_op`, and an `operator` preserves it.
    if not any(entries) and hash(function) != hash(packet):
        function = operator(packet, None, function)
    # Build a linked list of functions, one for each overload that can try native calls (calls that
    # skip the dispatcher). Stop at the first overload that has no `entry`, the C++ object for
    # native calls.
    chain = None
    for entry in reversed(entries):
        chain = operator(packet, entry, function, chain) if entry else None
    torch_ops.replace_function(packet, function if chain is None else chain)


def replaced_function(overload: OpOverload) -> Any:
    return overload._op


# For each class of `torch.ops`, the names used by the code of `__call__` if the method only
# forwards the call to `self._op`. There is one tuple for each variant of the method in the
# supported releases, and `forwarding_classes` compares the tuples with the installed PyTorch. (The
# methods do more if the operator takes TorchScript classes.) Since 2.14, calls that skip
# `__torch_function__` use `_cpp_dispatch_handle` instead of `_op`, and so does the extension.
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

    Classes whose `__call__` was monkeypatched, or differs in a newer PyTorch, are omitted.
    """
    return [
        cls
        for cls, names in _FORWARDING_CALLS.items()
        if getattr(getattr(vars(cls)["__call__"], "__code__", None), "co_names", None) in names
    ]
