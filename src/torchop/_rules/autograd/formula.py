"""What a formula comes to: `Formula`, and `Backward`, which is more than a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchop._rules.autograd.forward_mode import Tangents


class Formula(NamedTuple):
    """The compiled rule: `setup_context(ctx, inputs, keyword_only_inputs, output)` and backward."""

    backward: Callable[..., Any] | None
    setup_context: Callable[[Any, Any, Any, Any], Any] | None
    tangents: Tangents | None = None
    # Of a derived formula: `compute(ctx, args, kwargs, call)` makes the call, and saves for it;
    # `record(keyset, args, kwargs, otherwise)` records the graph of the body, or does otherwise.
    compute: Callable[[Any, Any, Any, Callable[[], Any]], Any] | None = None
    record: Callable[[Any, Any, Any, Callable[[], Any]], Any] | None = None
    # Whether a native call, which knows none of these, does the same.
    is_native: bool = True


class Backward:
    """What stands for a `backward` that is more than a function: derived, or opaque.

    They live in modules that are imported when an operator has one.
    """

    __slots__ = ()
    title = "autograd"

    def __call__(self, ctx: Any, *grads: Any) -> Any:
        """Computes the gradients."""
        raise NotImplementedError  # each kind defines its own

    def formula(self, setup_context: Callable[[Any, Any, Any, Any], Any] | None) -> Formula:
        """The compiled rule."""
        raise NotImplementedError  # each kind defines its own
