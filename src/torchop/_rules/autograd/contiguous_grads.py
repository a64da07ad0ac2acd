"""Copy incoming gradients into the layouts that a backward formula declares.

The annotation of a parameter declares the layout of one gradient, and the option `contiguous_grads`
of `register_autograd` makes all gradients contiguous.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import zip_longest
from types import FunctionType
from typing import Any, cast

from torch import Tensor

from torchop._errors import naming
from torchop._schema import signatures
from torchop._schema.layouts import Layout, contiguous, declared_layouts


def with_contiguous_grads(backward: Callable[..., Any]) -> FunctionType:
    """Wrap a backward formula to make all gradients contiguous before the formula sees them.

    Without the wrapper, autograd may pass gradients that are expanded (from `sum`), sliced (from
    `torch.cat`) or lazily conjugated (from `conj`).
    """

    @functools.wraps(backward)
    def with_copies(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, *(_arranged(grad, contiguous) for grad in grads))

    return cast(FunctionType, with_copies)


def with_declared_grads(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward formula to copy gradients into the layouts that its annotations declare."""
    with naming(signatures.spell_function(backward)):
        layouts = declared_layouts(signatures.written_annotations(backward))
    if not layouts:
        return backward
    each = [layouts.get(name) for name in [*inspect.signature(backward).parameters][1:]]
    if all(layout is contiguous for layout in each):
        return with_contiguous_grads(backward)

    @functools.wraps(backward)
    def arranged(ctx: Any, *grads: Any) -> Any:
        pairs = zip_longest(grads, each[: len(grads)])
        return backward(ctx, *[_arranged(grad, layout) for grad, layout in pairs])

    return arranged


def _arranged(grad: Any, layout: Layout | None) -> Any:
    if layout is None or grad is None:
        return grad
    if isinstance(grad, Tensor):
        # `copied` does not resolve lazy conjugation and negation, so resolve them here: a kernel
        # that ignores strides most likely ignores the conj and neg bits as well.
        return layout.copied(grad).resolve_conj().resolve_neg()
    return [_arranged(item, layout) for item in grad]


# All wrapped backward formulas share this code object. The C++ backward implementation uses it to
# recognize them. If all gradients are already contiguous, it skips the wrapper and calls
# `__wrapped__` directly.
CONTIGUOUS_CODE = with_contiguous_grads(print).__code__
