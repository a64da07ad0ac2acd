"""Formulas that get the tensors of their rank instead of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from torchop._compat import dtensor, simulated_ranks
from torchop._core.definition import Definition
from torchop._rules.autograd.formula import Backward, Formula
from torchop._rules.autograd.gradients import flat_gradients, flatten, layout_of, unflatten
from torchop._rules.user.sharding import local

Setup = Callable[[Any, Any, Any, Any], Any]


class LocalBackward(Backward):
    """A formula that cannot read DTensors, such as one in NumPy: it gets the shards of its rank."""

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
        """Makes the call; if it is on DTensors, on those of this rank, where the rest goes on."""
        if not dtensor.has_dtensors((args, kwargs)):
            return call()
        schema = self.definition.schema
        result, ctx._torchop_shards = local.call_on_shards(self.definition.overload, args, kwargs)
        layout = layout_of(ctx.needs_input_grad)
        filled, _ = schema.fill_defaults(args, kwargs)
        # Which entries of the gradients belong to tensors.
        ctx._torchop_of_tensors = [isinstance(value, Tensor) for value in flatten(filled, layout)]
        return result

    def _setup(self, setup_context: Setup) -> Setup:
        """Shows `setup_context` the shards of this rank, if the call was made on these."""

        def setup_on_shards(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
            call: local.LocalCall | None = getattr(ctx, "_torchop_shards", None)
            if call is not None:
                inputs, keywords = self.definition.schema.fill_defaults(call.args, call.kwargs)
                output = call.result
                # The node keeps only what is saved.
                ctx._torchop_shards = call._replace(args=(), kwargs={}, result=None)
            setup_context(ctx, inputs, keywords, output)

        return setup_on_shards

    def __call__(self, ctx: Any, *grads: Any) -> Any:
        call: local.LocalCall | None = getattr(ctx, "_torchop_shards", None)
        if call is None:
            return self._gradients(ctx, *grads)
        layout = layout_of(grads)
        shards = local.grads_on_shards(call, flatten(grads, layout))
        needed = ctx.needs_input_grad
        inputs = layout_of(needed)

        def gradients_of(ctx: Any, *shards: Any) -> list[Any]:
            result = self._gradients(ctx, *unflatten(shards, layout))
            return flat_gradients(self.definition, result, inputs, needed)

        if simulated_ranks.are_simulated():
            gradients_of = _on_each_rank(gradients_of)
        flat = gradients_of(ctx, *shards)
        of_tensors = [
            grad for grad, is_tensor in zip(flat, ctx._torchop_of_tensors, strict=True) if is_tensor
        ]
        gradients = iter(local.gradients_as_dtensors(call, of_tensors))
        placed = [next(gradients) if is_tensor else None for is_tensor in ctx._torchop_of_tensors]
        return unflatten(placed, inputs)

    def _gradients(self, ctx: Any, *grads: Any) -> Any:
        return self.__wrapped__(ctx, *grads)


def _on_each_rank(gradients_of: Callable[..., Any]) -> Callable[..., Any]:
    """Shows a formula the context and the gradients of one simulated rank after the other."""

    def of_all_ranks(ctx: Any, *grads: Any) -> Any:
        attributes = {n: v for n, v in vars(ctx).items() if not n.startswith("_torchop_")}
        attributes |= {"saved_tensors": ctx.saved_tensors, "needs_input_grad": ctx.needs_input_grad}

        def of_one(attributes: Any, *grads: Any) -> Any:
            return gradients_of(SimpleNamespace(**attributes), *grads)

        return simulated_ranks.on_each_rank(of_one)(attributes, *grads)

    return of_all_ranks
