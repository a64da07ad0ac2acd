"""Formulas: how the calls of an operator record gradients, one class for each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._rules.autograd.forward_mode import Tangents
from torchop._schema.callables import setup_caller

# The last one covers the others, which give the parameters of a lambda a type.
SetupContext = (
    Callable[[Any, Any, Any], Any] | Callable[[Any, Any, Any, Any], Any] | Callable[..., Any]
)


class Formula:
    """How calls record gradients: what they run and save, and the backward that reads it.

    This class is for a formula that a user wrote, and for an operator that has none. Derived
    formulas have a subclass in `derived`. A call from the
    dispatcher takes the steps `run` and `save`. A native call meets no modes, tracers or Tensor
    subclasses, so it calls `look`, and then the kernel itself in place of `run`.

    Attributes:
        definition: of the operator; None in `NO_FORMULA`, which all operators without one share.
        function: the `backward(ctx, *grads)` of a user; None for a derived formula.
        setup_context: as the user wrote it.
        setup: the same, called with `(ctx, inputs, keyword_only_inputs, output)`.
        backward: what computes the gradients; None if there is no formula.
        training: the training form, if the operator has residuals and `setup_context` asks for
            them: see `training`.
        save: `save(ctx, inputs, keyword_only_inputs, output, *seen)`, after the kernel, where
            `seen` is what `run` returned after the result, or what `look` returned; None if nothing
            is saved.
        look: `look(inputs, keyword_only_inputs)`, before the kernel of a native call. If it returns
            NotImplemented, the dispatcher makes the call.
        tangents: the formula for forward mode, set by the rule when it compiles a plan.
    """

    def __init__(
        self,
        definition: Any,
        function: Callable[..., Any] | None = None,
        setup_context: SetupContext | None = None,
        training: Any = None,
    ) -> None:
        self.definition = definition
        self.function = function
        self.setup_context = setup_context
        self.training = training
        has_keywords = setup_context is not None and bool(definition.schema.keyword_only)
        self.setup = setup_caller(setup_context, has_keywords)
        self.backward = function
        self.save: Callable[..., None] | None = self.setup
        self.look: Callable[[Any, Any], Any] | None = None
        if training is not None:
            self.save, self.look = training.saving(self.setup), training.look
        self.tangents: Tangents | None = None

    @property
    def title(self) -> str | None:
        """What a `repr` says of it; None if there is no formula."""
        return None if self.function is None else "autograd"

    @property
    def cache_part(self) -> object:
        """What compilers bake into a graph: of what they call as an operator, not the code."""
        return self.function or self.title

    def run(self, ctx: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Makes the call from the dispatcher; returns the result, and what else `save` gets."""
        return (call(),) if self.training is None else self.training(args, kwargs)


NO_FORMULA = Formula(None)


class Derived:
    """Declares in a class, in place of a backward, that it is derived from the body."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "torchop.derived"


derived = Derived()
