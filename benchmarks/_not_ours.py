"""What torchop costs the operators that it does not make native.

Calls of every object of torch.ops come to a function of torchop, which hands over those that are
not its own. It lies in a slot of the class, where Python lets nobody put it back: so it is put
there and taken away here by its address, in turns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from _harness import Call
from _routes import OPS, PLAIN

TITLE = "not ours"
# tp_call of a PyTypeObject, which PyObject_VAR_HEAD, 3 pointers long, and 13 fields precede.
_OFFSET = 16 * ctypes.sizeof(ctypes.c_void_p)
_slot = ctypes.c_void_p.from_address(id(OpOverload) + _OFFSET)


class _Call(Call):
    """Calls while the slot holds PyTorch's function."""

    def seconds(self, times: int) -> float:
        ours, _slot.value = _slot.value, _stock_function()
        try:
            return super().seconds(times)
        finally:
            _slot.value = ours


def _stock_function() -> int | None:
    """What the slot of a class holds whose `__call__` is a Python function."""
    return ctypes.c_void_p.from_address(id(_Callable) + _OFFSET).value


class _Callable:
    def __call__(self) -> None: ...


def calls() -> Mapping[str, Call]:
    """An operator of PyTorch's, with torchop's function in the slot and with PyTorch's.

    Raises:
        RuntimeError: both are the same, so there is nothing to compare.
    """
    if _slot.value == _stock_function():
        raise RuntimeError("torchop has not replaced how objects of torch.ops are called")
    arguments = [torch.randn(4)]
    function = torch.ops.aten.neg.default
    return {PLAIN: _Call(function, arguments), OPS: Call(function, arguments)}
