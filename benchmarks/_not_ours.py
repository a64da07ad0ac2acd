"""Measure the cost of torchop for operators without native calls.

torchop replaces `tp_call` of the torch.ops classes, and passes calls of other operators on to
PyTorch. To compare, this swaps the slot by address, because Python code cannot restore it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from _harness import Call
from _routes import OPS, PLAIN

TITLE = "not ours"
# The offset of `tp_call` in PyTypeObject: PyObject_VAR_HEAD takes 3 pointers, then come 13 fields.
_OFFSET = 16 * ctypes.sizeof(ctypes.c_void_p)
_slot = ctypes.c_void_p.from_address(id(OpOverload) + _OFFSET)


class _Call(Call):
    """A call that is timed with PyTorch's function in the slot."""

    def seconds(self, times: int) -> float:
        ours, _slot.value = _slot.value, _stock_function()
        try:
            return super().seconds(times)
        finally:
            _slot.value = ours


def _stock_function() -> int | None:
    """Return the `tp_call` that Python gives to classes with a `__call__` method."""
    return ctypes.c_void_p.from_address(id(_Callable) + _OFFSET).value


class _Callable:
    def __call__(self) -> None: ...


def calls() -> Mapping[str, Call]:
    """Return calls of a PyTorch operator, with torchop's function in the slot and without.

    Raises:
        RuntimeError: torchop has not replaced the slot.
    """
    if _slot.value == _stock_function():
        raise RuntimeError("torchop has not replaced tp_call of torch.ops.OpOverload")
    arguments = [torch.randn(4)]
    function = torch.ops.aten.neg.default
    return {PLAIN: _Call(function, arguments), OPS: Call(function, arguments)}
