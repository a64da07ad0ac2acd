"""Fake tensors that are passed to kernel conditions in place of real tensors."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the shape, strides, dtype and device of `tensor`.

    Return a tensor without strides unchanged.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    mode = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = FakeTensorMode()
    # `from_tensor` also creates views of bases, and takes ten times as long.
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = FakeTensor(mode, meta, tensor.device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # otherwise `data_ptr()` warns and returns 0
    return made


_thread = threading.local()  # entering a mode is not thread-safe

# Attributes that the fake tensor does not share with the real one.
_OWN = frozenset(
    (
        *("_base", "_is_view", "_version", "storage_offset", "storage", "untyped_storage"),
        *("is_inference", "is_pinned", "is_set_to", "is_shared"),
        *("grad", "grad_fn", "is_leaf", "output_nr", "requires_grad", "retains_grad"),
    )
)


class StandInError(RuntimeError):
    """A condition read an attribute that the fake tensor lacks; the argument is its name."""


class ReadingStandIns(TorchFunctionMode):
    """Rejects access to attributes that the fake tensor does not share."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Property getters are bound methods, named by the property.
        name = getattr(getattr(func, "__self__", None), "__name__", None)
        name = name if func.__name__ == "__get__" else func.__name__
        if name in _OWN:
            raise StandInError(name)
        return func(*args, **(kwargs or {}))
