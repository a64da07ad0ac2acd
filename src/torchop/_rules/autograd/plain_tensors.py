"""Formulas that read data, and get the plain tensors of a call in place of those around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchop._core.definition import Definition
from torchop._rules.autograd.formula import Formula, SetupContext, plain_calls
from torchop._rules.autograd.gradients import flat_gradients, flatten, layout_of, unflatten


class PlainFormula(Formula):
    """A formula that cannot read tensors such as DTensors, because it is in NumPy or opaque."""

    def __init__(
        self,
        definition: Definition,
        function: Callable[..., Any],
        setup_context: SetupContext | None,
    ) -> None:
        super().__init__(definition, function, setup_context)
        self.backward = self._backward
        self.save = self._save

    def run(self, ctx: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Makes the call on the plain tensors, if there are others around these."""
        made = (make(self.definition.overload, args, kwargs) for make in plain_calls)
        plain = next((plain for plain in made if plain is not None), None)
        if plain is None:
            return (call(),)
        # Not kept: it leads to the node, and so to `ctx`.
        output, plain.output = plain.output, None
        return output, plain

    def _save(self, ctx: Any, inputs: Any, keywords: Any, output: Any, plain: Any = None) -> None:
        """Shows `setup_context` the plain tensors, if the call was made on these."""
        if plain is not None:
            # Which entries of the gradients belong to tensors.
            values = flatten(inputs, layout_of(ctx.needs_input_grad))
            ctx._torchop_plain = plain, [isinstance(value, Tensor) for value in values]
            inputs, keywords = self.definition.schema.fill_defaults(plain.args, plain.kwargs)
            output = plain.result
            plain.forget()  # the node keeps only what is saved
        if self.setup is not None:
            self.setup(ctx, inputs, keywords, output)

    def _backward(self, ctx: Any, *grads: Any) -> Any:
        plain, of_tensors = getattr(ctx, "_torchop_plain", (None, ()))
        if plain is None:
            return self._gradients(ctx, *grads)
        layout = layout_of(grads)
        needed = ctx.needs_input_grad
        inputs = layout_of(needed)

        def gradients_of(ctx: Any, *plain_grads: Any) -> list[Any]:
            result = self._gradients(ctx, *unflatten(plain_grads, layout))
            flat = flat_gradients(self.definition, result, inputs, needed)
            return [g for g, is_tensor in zip(flat, of_tensors, strict=True) if is_tensor]

        gradients = iter(plain.gradients(gradients_of, ctx, flatten(grads, layout)))
        placed = [next(gradients) if is_tensor else None for is_tensor in of_tensors]
        return unflatten(placed, inputs)

    def _gradients(self, ctx: Any, *grads: Any) -> Any:
        assert self.function is not None  # a user wrote it
        return self.function(ctx, *grads)
