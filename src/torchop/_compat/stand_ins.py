"""Fake tensors that replace the real ones in calls to a provider's `supports` function.

A provider is an alternative source of an operator's kernels. Its `supports` function receives the
arguments of a call, and decides whether the provider can run the call. The decision is reused for
calls with similar tensors, so it must not depend on data.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the shape, strides, dtype and device of `tensor`.

    Tensors without strides and quantized tensors are returned unchanged.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    mode = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = FakeTensorMode()
    # Do not use `mode.from_tensor`, because it would also recreate views, and takes ten times as
    # long.
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = FakeTensor(mode, meta, tensor.device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # otherwise `data_ptr()` returns 0 and warns
    return made


_thread = threading.local()  # one mode per thread, because entering a mode is not thread-safe

# The attributes that may differ between the fake tensor and the real one.
_OWN = frozenset(
    (
        *("_base", "_is_view", "_version", "storage_offset", "storage", "untyped_storage"),
        *("is_inference", "is_pinned", "is_set_to", "is_shared"),
        *("grad", "grad_fn", "is_leaf", "output_nr", "requires_grad", "retains_grad"),
    )
)


class StandInError(RuntimeError):
    """Raised if `supports` reads an attribute in which fake and real tensors may differ.

    The exception's argument is the name of the attribute.
    """


class ReadingStandIns(TorchFunctionMode):
    """A mode that raises StandInError if code reads a tensor attribute that is in `_OWN`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # If code reads a property, `func` is the bound method `__get__` of the property object. In
        # this case, use the name of the property.
        name = getattr(getattr(func, "__self__", None), "__name__", None)
        name = name if func.__name__ == "__get__" else func.__name__
        if name in _OWN:
            raise StandInError(name)
        return func(*args, **(kwargs or {}))
