"""Contiguous incoming gradients, for a formula that reads memory without looking at strides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor


def with_contiguous_grads(backward: Callable[..., Any]) -> FunctionType:
    """Return a formula that calls `backward` with gradients in `torch.contiguous_format`.

    Autograd passes gradients as it gets them: expanded from `sum`, narrowed from `torch.cat`,
    lazily conjugated from `conj`.
    """

    @functools.wraps(backward)
    def contiguous(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, *map(_contiguous, grads))

    return cast(FunctionType, contiguous)


# The code that all such formulas share. Native calls recognize them by it, and call `__wrapped__`
# where no gradient needs a copy.
CONTIGUOUS_CODE = with_contiguous_grads(print).__code__


def _contiguous(grad: Any) -> Any:
    if isinstance(grad, Tensor):
        # Sparse gradients have no strides, and PyTorch refuses to make them contiguous.
        if grad.layout not in _WITH_STRIDES:
            return grad
        # `contiguous` returns a lazily conjugated or negated tensor itself.
        return grad.contiguous().resolve_conj().resolve_neg()
    return grad if grad is None else [_contiguous(each) for each in grad]


_WITH_STRIDES = (torch.strided, torch.jagged)
