"""PyTorch operators with C++ kernels."""

from .ops import softcap

__all__ = ["softcap"]
