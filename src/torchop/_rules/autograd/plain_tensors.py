"""Formulas that read data, and get the plain tensors of a call in place of those around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._core.definition import Definition
from torchop._rules.autograd.formula import Backward, Formula, plain_calls
from torchop._rules.autograd.gradients import flat_gradients, flatten, layout_of, unflatten

Setup = Callable[[Any, Any, Any, Any], Any]


class PlainBackward(Backward):
    """A formula that cannot read tensors such as DTensors, because it is in NumPy or opaque."""

    __slots__ = ("__wrapped__", "definition")

    def __init__(self, definition: Definition, function: Callable[..., Any]) -> None:
        self.definition = definition
        self.__wrapped__ = function

    def formula(self, setup_context: Setup | None) -> Formula:
        return Formula(self, setup_context and self._setup(setup_context), compute=self.compute)

    def cache_part(self) -> object:
        return self.__wrapped__

    def compute(
        self, ctx: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]
    ) -> Any:
        """Makes the call, on the plain tensors if there are others, where the rest goes on."""
        made = (make(self.definition.overload, args, kwargs) for make in plain_calls)
        ctx._torchop_plain = next((plain for plain in made if plain is not None), None)
        if ctx._torchop_plain is None:
            return call()
        filled, _ = self.definition.schema.fill_defaults(args, kwargs)
        # Which entries of the gradients belong to tensors.
        values = flatten(filled, layout_of(ctx.needs_input_grad))
        ctx._torchop_of_tensors = [isinstance(value, Tensor) for value in values]
        # Not kept: it leads to the node, and so to `ctx`.
        output, ctx._torchop_plain.output = ctx._torchop_plain.output, None
        return output

    def _setup(self, setup_context: Setup) -> Setup:
        """Shows `setup_context` the plain tensors, if the call was made on these."""

        def setup_on_plain(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
            plain = getattr(ctx, "_torchop_plain", None)
            if plain is not None:
                inputs, keywords = self.definition.schema.fill_defaults(plain.args, plain.kwargs)
                output = plain.result
                plain.forget()  # the node keeps only what is saved
            setup_context(ctx, inputs, keywords, output)

        return setup_on_plain

    def __call__(self, ctx: Any, *grads: Any) -> Any:
        plain = getattr(ctx, "_torchop_plain", None)
        if plain is None:
            return self._gradients(ctx, *grads)
        layout = layout_of(grads)
        needed, of_tensors = ctx.needs_input_grad, ctx._torchop_of_tensors
        inputs = layout_of(needed)

        def gradients_of(ctx: Any, *plain_grads: Any) -> list[Any]:
            result = self._gradients(ctx, *unflatten(plain_grads, layout))
            flat = flat_gradients(self.definition, result, inputs, needed)
            return [g for g, is_tensor in zip(flat, of_tensors, strict=True) if is_tensor]

        gradients = iter(plain.gradients(gradients_of, ctx, flatten(grads, layout)))
        placed = [next(gradients) if is_tensor else None for is_tensor in of_tensors]
        return unflatten(placed, inputs)

    def _gradients(self, ctx: Any, *grads: Any) -> Any:
        return self.__wrapped__(ctx, *grads)
