"""Stand-ins: fake tensors that the conditions of kernels are asked about in place of real ones."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has the shape, strides, dtype and device of another one, but no data.

    For a tensor that has no strides, the tensor itself.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    mode = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = FakeTensorMode()
    # Not from_tensor, which makes views of bases, and takes ten times as long.
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = FakeTensor(mode, meta, tensor.device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # else it is 0, with a warning
    return made


_thread = threading.local()  # a mode is entered by operators on its tensors, in one thread

# What a stand-in says of itself, and not of the tensor for which it stands.
_OWN = frozenset(
    (
        *("_base", "_is_view", "_version", "storage_offset", "storage", "untyped_storage"),
        *("is_inference", "is_pinned", "is_set_to", "is_shared"),
        *("grad", "grad_fn", "is_leaf", "output_nr", "requires_grad", "retains_grad"),
    )
)


class StandInError(RuntimeError):
    """A function read of a stand-in what that cannot know; the argument is the attribute."""


class ReadingStandIns(TorchFunctionMode):
    """Refuses what a stand-in does not have of the tensor for which it stands."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The getter of a property is a bound method, and the property has the name.
        name = getattr(getattr(func, "__self__", None), "__name__", None)
        name = name if func.__name__ == "__get__" else func.__name__
        if name in _OWN:
            raise StandInError(name)
        return func(*args, **(kwargs or {}))
