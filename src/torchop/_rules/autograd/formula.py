"""The class `Formula`: an operator's backward formula, and the functions that save its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._rules.autograd.constants import Computed
from torchop._rules.autograd.forward_mode import Tangents
from torchop._schema.callables import setup_caller

# `Callable[..., Any]` already accepts every function, but with the narrower types, type checkers
# can infer the types of a lambda's parameters.
SetupContext = (
    Callable[[Any, Any, Any], Any] | Callable[[Any, Any, Any, Any], Any] | Callable[..., Any]
)


class Formula:
    """A backward formula, and the functions that run and record a call.

    This class is for formulas registered by the user. The subclass `DerivedFormula` needs no
    function from the user, because it differentiates the kernel instead.

    A call through the dispatcher runs `run` and then `save`. If there are no modes, no tracing and
    no Tensor subclasses, C++ code can run the call without the dispatcher. Such a native call runs
    `before_kernel`, the kernel, and then `save`.

    Attributes:
        definition: the operator. None in `NO_FORMULA`, which all operators without a formula share.
        function: the user's `backward(ctx, *grads)`. None for a derived backward formula.
        setup: a wrapper of `setup_context`, or None. The wrapper always has the signature
            `(ctx, inputs, keyword_only_inputs, output)`.
        backward: computes the gradients. None if no formula is registered.
        training: the operator's training form, if `setup_context` has the parameter `residuals`.
            The training form is a helper operator that also returns the residuals, i.e. the kernel
            outputs that only the backward pass uses.
        save: called after the kernel to save values for the backward pass, as
            `save(ctx, inputs, keyword_only_inputs, output, *extra)`. `extra` contains the values
            that `run` returned after the result, or the value that `before_kernel` returned.
        before_kernel: called before the kernel of a native call, as
            `before_kernel(inputs, keyword_only_inputs)`. If it returns NotImplemented, the call
            falls back to the dispatcher.
        traced: called in place of the operator while a compiler traces a call. If it returns
            NotImplemented, the call is recorded as usual.
        tangents: the forward-mode formula, which `AutogradRule.compile` sets.
        computed: the tensors that `setup_context` computes. The list is empty until the first call
            records a gradient in eager mode, and is shared by all copies of the formula.
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
        self.traced: Callable[[Any, Any], Any] | None = None
        if training is not None:
            self.save, self.before_kernel = training.saving(self.setup), training.before_kernel
        self.tangents: Tangents | None = None
        self.computed: list[Computed] = [] if self.setup is not None else [Computed()]

    @property
    def title(self) -> str | None:
        """A short name for `repr`, or None if no formula is registered."""
        return None if self.function is None else "autograd"

    @property
    def cache_part(self) -> object:
        """The backward formula's part of the cache keys of compiled graphs.

        PyTorch's own cache keys ignore the formula (pytorch/pytorch#144344). For a formula
        registered by the user, this is the user's function, because compilers trace its code into
        the graph. For a derived formula, the graph only calls a helper operator, so the string
        "autograd derived" is enough.
        """
        return self.function or self.title

    def run(self, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Call the kernel through the dispatcher, and return the tuple `(result, *extra)`.

        `extra` contains the additional arguments of `save`.
        """
        return (call(),) if self.training is None else self.training(args, kwargs)


NO_FORMULA = Formula(None)


class Derived:
    """The type of `torchop.derived`, a marker that replaces `backward` in an operator class."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "torchop.derived"


derived = Derived()
