"""The formula that `derive_autograd` registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import autograd, checkpointing, dispatch, dtensor, functorch, tracing
from torchop._compat.classes import Tag
from torchop._core.call import as_tuple, tensors_in
from torchop._core.definition import Definition
from torchop._errors import GradientError
from torchop._rules import inlining
from torchop._rules.autograd.derived import replay
from torchop._rules.autograd.derived.differentiate import (
    Rerun,
    output_tensors,
)
from torchop._rules.autograd.derived.saved_call import of_each_tensor, split_tensors
from torchop._rules.autograd.formula import Formula
from torchop._rules.autograd.gradients import is_differentiable, placed
from torchop._rules.effect import EffectRule


class DerivedFormula(Formula):
    """A backward formula that runs the operator's body again and differentiates it.

    The body is the code of the operator's kernel. The forward pass only saves the inputs.
    """

    def __init__(self, definition: Definition, for_graphs: tuple[Any, Any] | None) -> None:
        super().__init__(definition)
        # The two helper operators for compiled graphs: `name__training` and `name__backward`. None
        # in the backward formulas of the helper operators themselves, because AOTAutograd does not
        # support double backward.
        self.for_graphs = for_graphs
        self.backward = self._backward
        self.save = self._save
        self.before_kernel = self._before_kernel
        if definition.declaration.inlined is not None:
            self.traced = self._traced

    @property
    def title(self) -> str:
        return "autograd derived"

    def run(self, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Call the kernel. Return the result, and the packed ambient state or None.

        The ambient state is the state that the backward pass must restore to run the body again,
        such as the states of random number generators.
        """
        filled, keywords = self.definition.schema.fill_defaults(args, kwargs)
        values = (*filled, *keywords.values())
        tensors = list(tensors_in(values))
        is_batched = any(map(functorch.holds_batch, tensors))
        self._check_no_effect()
        if self.for_graphs is not None:
            training, _ = self.for_graphs
            if is_batched and tracing.is_tracing(tensors):
                # The user's vmap rule may call several operators, each with a different generator
                # state. A single saved generator state could not reproduce the random numbers of
                # all of them.
                training.forbid_random_numbers()
                return call(), None
            if not is_batched and (
                tracing.is_tracing(tensors)
                # When selective checkpointing repeats the forward pass, it may return the cached
                # result of the first call. The backward pass then needs the generator state of the
                # first call. `name__training` returns this state, so it is cached together with the
                # result.
                or (training.draws_numbers and checkpointing.selective_checkpointing_is_active())
            ):
                result, packed = training(args, kwargs)
                return result, packed
        state = replay.ambient_state(values)
        with replay.capture_guard(self.definition, state):
            result = call()
        # For DTensors, `_backward` can call `name__backward` only if the call saved no generator
        # states and settings. So do not save them if they cannot affect the result.
        is_needed = (
            not state.is_plain
            or not dtensor.has_dtensors(values)
            or dispatch.dispatch_modes_are_active()
            or Tag.nondeterministic_seeded in self.definition.declaration.tags
            or replay.has_changed(state, values)
        )
        return result, state.packed if is_needed else None

    def _traced(self, args: Any, kwargs: Any) -> Any:
        """Inline the operator's body into the graph if the gradients match those of eager mode.

        They differ if an output has no autograd history (the derived backward formula raises
        GradientError) or if an input affects no output (the formula returns a gradient of zero). In
        these cases, return NotImplemented, so that the call is recorded as usual.
        """
        self._check_no_effect()
        result = inlining.traced_above_autograd(self.definition, args, kwargs)
        if result is NotImplemented or functorch.is_active():
            return result
        results = tensors_in(as_tuple(self.definition.schema, result))
        outputs = [tensor for tensor in results if is_differentiable(tensor)]
        inputs = [tensor for tensor in tensors_in(args) if tensor.requires_grad]
        if all(tensor.requires_grad for tensor in outputs) and autograd.all_affect(inputs, outputs):
            return result
        return NotImplemented

    def _before_kernel(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return packed generator states and settings for a native call (without the dispatcher).

        While a CUDA graph is being captured, return NotImplemented to use the dispatcher instead,
        because only `run` checks that the body draws no random numbers.
        """
        self._check_no_effect()
        state = replay.ambient_state((*args, *kwargs.values()))
        return NotImplemented if state.is_captured else state.packed

    def _save(
        self,
        ctx: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        packed: Tensor | None,
    ) -> None:
        """Save the arguments and the packed ambient state (e.g. generator states) on `ctx`.

        A native call (without the dispatcher) saves the state even if the kernel did not change it,
        because the body may have drawn random numbers and then reset the generator.
        """
        call, tensors = split_tensors(args, kwargs)
        # Do not replace missing gradients with zeros, because the backward pass skips outputs whose
        # gradient is None.
        ctx.set_materialize_grads(False)
        ctx._torchop_call = call
        ctx.save_for_backward(*tensors, packed)

    def _backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not hasattr(ctx, "_torchop_call"):
            raise GradientError(
                f"{self.definition}: this call was made while another formula was registered, so "
                f"it did not save the inputs of {self.title}. Register formulas before the "
                "forward, or call the operator again."
            )
        *tensors, packed = ctx.saved_tensors
        flat_grads = list(output_tensors(self.definition.schema.returns, grads))
        args, kwargs = ctx._torchop_call.with_tensors(tensors)
        needed = of_each_tensor(args, ctx.needs_input_grad)
        # For DTensors, call `name__backward`, because it uses the operator's sharding rule. But if
        # grad mode is enabled, run the body instead, so a double backward can differentiate it.
        on_shards = packed is None and self.for_graphs is not None and not torch.is_grad_enabled()
        if (
            torch.compiler.is_dynamo_compiling()  # true in compiled autograd
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

    def _check_no_effect(self) -> None:
        # `derive_autograd` already rejects operators with a side effect, but the effect may have
        # been registered later.
        if self.definition.plan[EffectRule] not in (None, "none"):
            raise GradientError(
                f"{self.definition}: an effect was registered after the formula was derived. The "
                "backward runs the body again, so the effect would happen twice. Write the formula "
                "with register_autograd."
            )


def _second_derivative(definition: Definition) -> GradientError:
    return GradientError(
        f"{definition}: a derived formula does not support double backward under a compiler. "
        "Differentiate twice in eager mode, or write the formula with register_autograd."
    )
