"""The backward formula of an operator, as stored in its call plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._rules.autograd.forward_mode import Tangents
from torchop._schema.callables import setup_caller

# `Callable[..., Any]` accepts every function. The other two give lambda parameters a type.
SetupContext = (
    Callable[[Any, Any, Any], Any] | Callable[[Any, Any, Any, Any], Any] | Callable[..., Any]
)


class Formula:
    """A formula written by the user, or the absence of one. `derived` has a subclass.

    A call through the dispatcher calls `run` and then `save`. A native call has no active modes,
    tracers or tensor subclasses, so it calls `before_kernel`, the kernel, and then `save`.

    Attributes:
        definition: the operator; None in `NO_FORMULA`, which operators without a formula share.
        function: the user's `backward(ctx, *grads)`; None for a derived formula.
        setup_context: the user's function.
        setup: `setup_context` with the uniform signature
            `(ctx, inputs, keyword_only_inputs, output)`.
        backward: the function that computes the gradients; None if there is no formula.
        training: the training form, if `setup_context` takes residuals. See
            `residuals/training.py`.
        save: `save(ctx, inputs, keyword_only_inputs, output, *extra)`, called after the kernel.
            `extra` holds the remaining values that `run` returned, or the value that
            `before_kernel` returned. None if nothing is saved.
        before_kernel: `before_kernel(inputs, keyword_only_inputs)`, called by native calls only. If
            it returns NotImplemented, the call falls back to the dispatcher.
        tangents: the forward-mode formula. Set when the rule compiles the call plan.
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
        self.before_kernel: Callable[[Any, Any], Any] | None = None
        if training is not None:
            self.save, self.before_kernel = training.saving(self.setup), training.before_kernel
        self.tangents: Tangents | None = None

    @property
    def title(self) -> str | None:
        """Return a short name for `repr`; None if there is no formula."""
        return None if self.function is None else "autograd"

    @property
    def cache_part(self) -> object:
        """Return the formula's contribution to the cache keys of compiled graphs.

        PyTorch's own cache keys ignore the formula: see pytorch/pytorch#144344. Compilers trace a
        user's function, so the key includes the code. A derived formula is called as an operator,
        so the name suffices.
        """
        return self.function or self.title

    def run(self, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Call the kernel through the dispatcher. Return the result and the extras for `save`."""
        return (call(),) if self.training is None else self.training(args, kwargs)


NO_FORMULA = Formula(None)


class Derived:
    """Marker for the class form: use it in place of `backward` to derive the formula."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "torchop.derived"


derived = Derived()
