"""Fake tensors that replace real ones in calls to a provider's `supports` function."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the shape, strides, dtype and device of `tensor`.

    A tensor without strides, or a quantized one, is returned unchanged.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    mode = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = FakeTensorMode()
    # Do not use `mode.from_tensor`, because it also recreates views, and takes ten times as long.
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = FakeTensor(mode, meta, tensor.device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # otherwise `data_ptr()` returns 0 and warns
    return made


_thread = threading.local()  # one mode per thread, because entering a mode is not thread-safe

# Attributes that may differ between the fake tensor and the real one.
_OWN = frozenset(
    (
        *("_base", "_is_view", "_version", "storage_offset", "storage", "untyped_storage"),
        *("is_inference", "is_pinned", "is_set_to", "is_shared"),
        *("grad", "grad_fn", "is_leaf", "output_nr", "requires_grad", "retains_grad"),
    )
)


class StandInError(RuntimeError):
    """Raised if `supports` reads an attribute that may differ. The argument is its name."""


class ReadingStandIns(TorchFunctionMode):
    """A mode that raises StandInError if an attribute that may differ from real tensors is read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The getter of a property is `property.__get__`; the property has the attribute's name.
        name = getattr(getattr(func, "__self__", None), "__name__", None)
        name = name if func.__name__ == "__get__" else func.__name__
        if name in _OWN:
            raise StandInError(name)
        return func(*args, **(kwargs or {}))
