"""An operator's backward formula, as native calls and the dispatcher use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._rules.autograd.forward_mode import Tangents
from torchop._schema.callables import setup_caller

# `Callable[..., Any]` accepts every function. With the other two types, type checkers can infer the
# types of a lambda's parameters.
SetupContext = (
    Callable[[Any, Any, Any], Any] | Callable[[Any, Any, Any, Any], Any] | Callable[..., Any]
)


class Formula:
    """A formula that the user registered. The subclass `DerivedFormula` needs no function.

    A call through the dispatcher calls `run` and then `save`. A native call, which is only possible
    without modes, tracing and Tensor subclasses, calls `before_kernel`, the kernel, and `save`.

    Attributes:
        definition: the operator. None in `NO_FORMULA`, which all operators without a formula share.
        function: the user's `backward(ctx, *grads)`. None for a derived formula.
        setup_context: the user's function.
        setup: calls `setup_context`. It always has the signature
            `(ctx, inputs, keyword_only_inputs, output)`.
        backward: the function that computes the gradients. None if no formula is registered.
        training: the training form of the operator, if `setup_context` takes residuals. See
            `residuals/training.py`.
        save: `save(ctx, inputs, keyword_only_inputs, output, *extra)`, called after the kernel.
            `extra` are the values that `run` returned in addition to the result, or the value that
            `before_kernel` returned. None if nothing is saved.
        before_kernel: `before_kernel(inputs, keyword_only_inputs)`, called in native calls only. If
            it returns NotImplemented, the call falls back to the dispatcher.
        tangents: the forward-mode formula. The autograd rule sets it when it compiles the call
            plan: the object that contains all functions that calls to the operator use.
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
        """Return a short name for `repr`, or None if no formula is registered."""
        return None if self.function is None else "autograd"

    @property
    def cache_part(self) -> object:
        """Return the formula's part of the cache keys of compiled graphs.

        PyTorch's own cache keys ignore the formula (pytorch/pytorch#144344). Compilers trace the
        user's function, so the key must depend on its code. In graphs, a derived formula is a call
        to a helper operator, so its title is enough.
        """
        return self.function or self.title

    def run(self, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Call the kernel through the dispatcher. Return the result and `extra` for `save`."""
        return (call(),) if self.training is None else self.training(args, kwargs)


NO_FORMULA = Formula(None)


class Derived:
    """The type of `torchop.derived`, the value of `backward` in the class form."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "torchop.derived"


derived = Derived()
