"""The `contiguous_grads` option of `register_autograd`, for kernels that ignore strides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor


def with_contiguous_grads(backward: Callable[..., Any]) -> FunctionType:
    """Wrap a backward formula so that it receives only contiguous gradients.

    Autograd may pass gradients that are expanded (from `sum`), slices (from `torch.cat`) or lazily
    conjugated (from `conj`).
    """

    @functools.wraps(backward)
    def contiguous(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, *map(_contiguous, grads))

    return cast(FunctionType, contiguous)


# All wrapped formulas share this code object, so the C++ implementation of the backward can
# recognize them. If all gradients are contiguous, C++ skips the wrapper and calls `__wrapped__`.
CONTIGUOUS_CODE = with_contiguous_grads(print).__code__


def _contiguous(grad: Any) -> Any:
    if isinstance(grad, Tensor):
        # `contiguous` raises for sparse layouts, because they have no strides.
        if grad.layout not in _WITH_STRIDES:
            return grad
        # `contiguous` does not resolve lazy conjugation and negation. Kernels that ignore strides
        # also ignore these bits, so resolve them too.
        return grad.contiguous().resolve_conj().resolve_neg()
    return grad if grad is None else [_contiguous(each) for each in grad]


_WITH_STRIDES = (torch.strided, torch.jagged)
