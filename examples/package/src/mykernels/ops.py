"""Define the operator softcap with a C++ kernel that does not use PyTorch's headers."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

import torchop

_softcap = ctypes.CDLL(str(Path(__file__).with_name("_native.so"))).softcap
_softcap.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float)
_softcap.restype = None


@torchop.out_op("mykernels::softcap", like="x", inplace=True, elementwise=True, device_types="cpu")
def softcap(x: Tensor, cap: float = 30.0, *, out: Tensor) -> None:
    """Compute `cap * tanh(x / cap)`. The result stays between `-cap` and `cap`."""
    if x.dtype != torch.float32:
        raise TypeError(f"softcap takes float32, got {x.dtype}.")
    # The C++ function receives just pointers and a size, so both tensors must be contiguous.
    source = x.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(source)
    _softcap(source.data_ptr(), target.data_ptr(), source.numel(), cap)
    if target is not out:
        out.copy_(target)


def _setup_context(ctx, inputs, output):
    ctx.cap = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return grad * (1 - (y / ctx.cap) ** 2), None


softcap.register_autograd(_backward, setup_context=_setup_context)


@softcap.functional.register_examples
def _():
    yield torch.randn(7, 3, requires_grad=True), 2.0
    yield (torch.randn(3, 7).t(),)
