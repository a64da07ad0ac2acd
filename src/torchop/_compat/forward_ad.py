"""Tangents, which forward mode carries along with tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad

from torchop._compat import functorch


def is_active() -> bool:
    """Whether tensors may carry tangents in this thread."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    if _forward_ad._current_level >= 0:
        return True
    # To look into an empty stack makes one, and every node of every later backward in this thread
    # would make a copy of it.
    if not functorch.is_active():
        return False
    # A compiled graph enters the level without telling Python.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Jvp


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows this tensor; only asked at a dual level."""
    return unpack_dual(tensor)[1] is not None


_DUAL_LEVEL = 0  # PyTorch has no other yet: transforms inside transforms wrap tensors instead


def unpack_dual(value: Any) -> tuple[Any, torch.Tensor | None]:
    """A tensor without the tangent with which forward mode follows it, and that tangent.

    A tensor that has none is returned as it is, and so is what is no tensor.
    """
    if not isinstance(value, torch.Tensor):
        return value, None
    try:
        primal, tangent = torch._VF._unpack_dual(value, level=_DUAL_LEVEL)
    except RuntimeError:
        if value.layout is torch.strided:
            raise
        return value, None  # to look, PyTorch makes a view; what has none cannot be dual either
    return value if tangent is None else primal, tangent


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Gives a tensor a tangent."""
    dual: torch.Tensor = torch._VF._make_dual(tensor, tangent, level=_DUAL_LEVEL)
    return dual
