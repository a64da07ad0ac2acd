"""Derived formulas, whose backward differentiates the body of the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import checkpointing, dispatch, dtensor, functorch, tracing
from torchop._compat.classes import Tag
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import GradientError
from torchop._rules.autograd.derived import replay
from torchop._rules.autograd.derived.differentiate import (
    Rerun,
    output_tensors,
)
from torchop._rules.autograd.derived.saved_call import of_each_tensor, split_tensors
from torchop._rules.autograd.formula import Formula
from torchop._rules.autograd.gradients import placed
from torchop._rules.effect import EffectRule


class DerivedFormula(Formula):
    """A formula whose backward differentiates the body of the operator.

    The forward saves the inputs, and the body runs again in the backward.
    """

    def __init__(self, definition: Definition, for_graphs: tuple[Any, Definition] | None) -> None:
        super().__init__(definition)
        # The training form and the backward operator, which compiled graphs call. These two have
        # none: PyTorch's compilers do not compute second derivatives.
        self.for_graphs = for_graphs
        self.backward = self._backward
        self.save = self._save
        self.look = self._look

    @property
    def title(self) -> str:
        return "autograd derived"

    def run(self, ctx: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Makes the call; returns the result and the ambient state, if the backward needs it."""
        filled, keywords = self.definition.schema.fill_defaults(args, kwargs)
        values = (*filled, *keywords.values())
        tensors = list(tensors_in(values))
        is_batched = any(map(functorch.holds_batch, tensors))
        self._refuse_effect()
        if self.for_graphs is not None:
            training, _ = self.for_graphs
            if is_batched and tracing.is_tracing(tensors):
                # The operator's vmap rule calls other operators, whose ambient state is unknown.
                training.refuse_random_numbers()
                return call(), None
            if not is_batched and (
                tracing.is_tracing(tensors)
                # A checkpoint may return the result of an earlier call, with its random numbers.
                # With the training form, it also saves the state of the generators of that call.
                or (training.draws_numbers and checkpointing.selective_checkpointing_is_active())
            ):
                result, packed = training(args, kwargs)
                return result, packed
        state = replay.ambient_state(values)
        with replay.repeatable(self.definition, state):
            result = call()
        # On shards, the backward takes none, so those that make no difference are not saved.
        is_needed = (
            not state.are_plain
            or not dtensor.has_dtensors(values)
            or dispatch.dispatch_modes_are_active()
            or Tag.nondeterministic_seeded in self.definition.declaration.tags
            or replay.have_changed(state, values)
        )
        return result, state.packed if is_needed else None

    def _look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Refuses an effect, and returns the ambient state before the body runs natively.

        While a graph is captured, `run` has to refuse random numbers.
        """
        self._refuse_effect()
        state = replay.ambient_state((*args, *kwargs.values()))
        return NotImplemented if state.are_captured else state.packed

    def _save(
        self,
        ctx: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        packed: Tensor | None,
    ) -> None:
        """Saves the call on `ctx`, with the ambient state in which the body ran.

        A native call always saves it: a body may read the state of a generator, or put it back
        after it has drawn.
        """
        call, tensors = split_tensors(args, kwargs)
        # None, for an output that nobody used, spares the backward what it was computed from.
        ctx.set_materialize_grads(False)
        ctx._torchop_call = call
        ctx.save_for_backward(*tensors, packed)

    def _backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not hasattr(ctx, "_torchop_call"):
            raise GradientError(
                f"{self.definition}: this call was made when the operator had another formula, "
                f"and did not save what {self.title} needs. Register formulas before the forward, "
                "or call the operator again."
            )
        *tensors, packed = ctx.saved_tensors
        flat_grads = list(output_tensors(self.definition.schema.returns, grads))
        args, kwargs = ctx._torchop_call.with_tensors(tensors)
        needed = of_each_tensor(args, ctx.needs_input_grad)
        # On shards, the body runs as it ran in the forward, by the same rule, and not by those of
        # the operators in it. A second derivative needs these in the graph.
        on_shards = packed is None and self.for_graphs is not None and not torch.is_grad_enabled()
        if (
            torch.compiler.is_dynamo_compiling()  # in compiled autograd
            or tracing.is_tracing(tensors)
            or any(map(functorch.holds_batch, tensors))
            or (on_shards and dtensor.has_dtensors(tensors))
        ):
            if self.for_graphs is None:
                raise _second_derivative(self.definition)
            _, backward = self.for_graphs
            gradients = backward.overload(flat_grads, packed, needed, *args, **kwargs)
        else:
            rerun = Rerun(self.definition, ctx._torchop_call, tensors, needed, packed)
            gradients = rerun.gradients(flat_grads, create_graph=torch.is_grad_enabled())
        return placed(gradients, ctx.needs_input_grad)

    def _refuse_effect(self) -> None:
        # The effect may be declared after the formula was derived.
        if self.definition.plan[EffectRule] not in (None, "none"):
            raise GradientError(
                f"{self.definition} got an effect after its formula was derived, and the effect "
                "would happen again in this backward, because it runs the body again. Write the "
                "formula with register_autograd."
            )


def _second_derivative(definition: Definition) -> GradientError:
    return GradientError(
        f"{definition}: a derived formula cannot be differentiated again under a compiler. "
        "Differentiate twice in eager mode, or write the formula with register_autograd."
    )
