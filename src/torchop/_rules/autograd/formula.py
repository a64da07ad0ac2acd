"""Formulas: as users declare them, and as a compiled rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from torchop._errors import short_repr
from torchop._rules.autograd.forward_mode import Tangents


class Formula(NamedTuple):
    """The compiled rule: `setup_context(ctx, inputs, keyword_only_inputs, output)` and backward."""

    backward: Callable[..., Any] | None
    setup_context: Callable[[Any, Any, Any, Any], Any] | None
    tangents: Tangents | None = None
    # `compute(ctx, args, kwargs, call)` runs `call`, and saves on `ctx` what the backward needs.
    compute: Callable[[Any, Any, Any, Callable[[], Any]], Any] | None = None
    # `record_body(inputs, keyword_only_inputs)` runs a derived formula's body and keeps its graph:
    # all of a call that no mode, subclass or transform has to see as one of the operator.
    record_body: Callable[[Any, Any], Any] | None = None
    # What a native call runs instead of `compute`: `look(inputs, keyword_only_inputs)` before the
    # kernel, and `save(ctx, inputs, keyword_only_inputs, output, seen)` after it, where `seen` is
    # what `look` returned.
    native_steps: tuple[Callable[..., Any], Callable[..., None]] | None = None


# Each is called with `(op, args, kwargs)`. If there are tensors such as DTensors among these, it
# makes the call on the plain tensors inside them; otherwise it returns None. The object that it
# returns has the `args`, `kwargs` and `result` of that call, which `forget()` drops; the `output`
# for the caller; and `gradients(formula, ctx, grads)`, which calls a `formula` of plain tensors and
# returns the gradient of each tensor.
plain_calls: list[Callable[..., Any]] = []


class Backward:
    """A backward that is more than the function of a user: derived, or opaque.

    The modules of the two kinds are imported when an operator has one.
    """

    __slots__ = ()
    title = "autograd"

    def __call__(self, ctx: Any, *grads: Any) -> Any:
        """Computes the gradients."""
        raise NotImplementedError  # each kind defines its own

    def formula(self, setup_context: Callable[[Any, Any, Any, Any], Any] | None) -> Formula:
        """The compiled rule."""
        raise NotImplementedError  # each kind defines its own

    def cache_part(self) -> object:
        """What compilers bake into a graph: of what they call as an operator, not the code."""
        return self.title


Strategy = Literal["recompute", "save"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


class Derived:
    """Declares in a class, in place of a backward, that it is derived from the body.

    Attributes:
        strategy: `"recompute"` or `"save"`; see `CustomOp.derive_autograd`.
    """

    __slots__ = ("strategy",)

    def __init__(self, strategy: Strategy) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(
                f'torchop.derived expects "recompute" or "save", got {short_repr(strategy)}.'
            )
        self.strategy: Strategy = strategy

    def __call__(self, strategy: Strategy) -> Derived:
        """The same with another strategy: `torchop.derived("save")`."""
        return Derived(strategy)

    def __repr__(self) -> str:
        return f"torchop.derived({self.strategy!r})"


derived = Derived("recompute")
