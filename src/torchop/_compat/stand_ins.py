"""Fake tensors that replace the real ones in calls to a provider's `supports` function.

A provider is an alternative source of kernels for an operator. Its `supports` function receives the
arguments of a call, and decides whether the provider can run the call. Since torchop reuses the
decision for calls with similar tensors, it must not depend on the data of the tensors.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the shape, strides, dtype and device of `tensor`.

    Quantized tensors, and tensors without strides, are returned unchanged.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    mode = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = FakeTensorMode()
    # `mode.from_tensor` would take ten times as long, partly because it recreates views.
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = FakeTensor(mode, meta, tensor.device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # otherwise `data_ptr()` returns 0 and warns
    return made


_thread = threading.local()  # one mode per thread, because entering a mode is not thread-safe

# Attributes that may differ between the fake and the real tensor, so a provider's `supports`
# function must not read them.
_OWN = frozenset(
    (
        *("_base", "_is_view", "_version", "storage_offset", "storage", "untyped_storage"),
        *("is_inference", "is_pinned", "is_set_to", "is_shared"),
        *("grad", "grad_fn", "is_leaf", "output_nr", "requires_grad", "retains_grad"),
    )
)


class StandInError(RuntimeError):
    """Raised if a provider's `supports` reads an attribute that may differ for real tensors.

    The exception's argument is the name of the attribute.
    """


class ReadingStandIns(TorchFunctionMode):
    """A mode that raises StandInError when a `supports` function reads one of these attributes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # When code reads a property, `func` is the `__get__` method of the property object, so take
        # the name from the property instead.
        name = getattr(getattr(func, "__self__", None), "__name__", None)
        name = name if func.__name__ == "__get__" else func.__name__
        if name in _OWN:
            raise StandInError(name)
        return func(*args, **(kwargs or {}))
