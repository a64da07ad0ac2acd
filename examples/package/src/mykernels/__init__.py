"""Kernels as operators of PyTorch."""

from .ops import softcap

__all__ = ["softcap"]
