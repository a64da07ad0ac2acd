"""A formula derived from the body of an operator, in place of one that is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import checkpointing, functorch, modes, tracing
from torchop._compat.classes import DispatchKey, DispatchKeySet
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError
from torchop._rules.autograd.derived import replay
from torchop._rules.autograd.derived.differentiate import (
    body_of,
    differentiable,
    gradients,
    is_differentiable,
    refuse_left_autograd,
)
from torchop._rules.autograd.derived.saved_call import flags_of_tensors, structured, taken_apart
from torchop._rules.autograd.formula import Backward, Formula
from torchop._rules.effect import EffectRule


class DerivedBackward(Backward):
    """The backward of an operator that differentiates its body.

    It stands where a formula that is written stands: `backward(ctx, *grads)`.
    """

    __slots__ = ("definition", "for_graphs", "strategy")

    def __init__(
        self,
        definition: Definition,
        strategy: str,
        for_graphs: tuple[Any, Definition] | None,
    ) -> None:
        self.definition = definition
        self.strategy = strategy
        # What compiled graphs call. There is nothing for the second derivative, which PyTorch's
        # compilers do not do.
        self.for_graphs = for_graphs

    @property
    def title(self) -> str:  # type: ignore[override]  # it says more than the class knows
        return f"autograd derived ({self.strategy})"

    def formula(self, setup_context: object) -> Formula:
        record = self._record if self.strategy == "save" else None
        # It looks at the state of the thread before the kernel runs.
        return Formula(self, None, compute=self.compute, record=record, is_native=False)

    # ----------------------------------------------------------------------------------------------
    # "recompute": the inputs are saved, and the body runs again in the backward

    def compute(
        self, ctx: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]
    ) -> Any:
        """Makes the call, and saves what the backward needs on `ctx`."""
        self._refuse_effect()
        filled, keywords = self.definition.schema.fill_defaults(args, kwargs)
        saved, tensors = taken_apart(filled, keywords)
        found: Tensor | None = None
        is_batched = any(map(functorch.holds_batch, tensors))
        if self.for_graphs is not None and (
            tracing.is_tracing(tensors) or (not is_batched and self._may_be_taken_from_before())
        ):
            training, _ = self.for_graphs
            if is_batched:
                # The operator's vmap rule calls what it likes, and cannot say what that found.
                training.refuse_random_numbers()
                result = call()
            else:
                result, found = training(args, kwargs)
        else:
            values = (*filled, *keywords.values())
            before = replay.surroundings(values)
            result = call()
            # A mode may have returned a result without running the body, as checkpointing does.
            may_not_have_run = modes.dispatch_modes_are_active()
            drew_numbers = replay.surroundings(values).random != before.random
            if may_not_have_run or drew_numbers or not before.is_plain:
                found = replay.pack(before)
        ctx.set_materialize_grads(False)
        ctx._torchop_call = saved
        ctx._torchop_needed = flags_of_tensors(filled, ctx.needs_input_grad)
        ctx.save_for_backward(*tensors, found)
        return result

    def _may_be_taken_from_before(self) -> bool:
        """Whether the result may be one that a checkpoint saved, and drew other numbers than now.

        The training form has the state of the generators saved with it.
        """
        assert self.for_graphs is not None  # it was asked for
        training, _ = self.for_graphs
        return training.draws_numbers and checkpointing.selective_checkpointing_is_active()

    def __call__(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not hasattr(ctx, "_torchop_call"):
            raise DerivedFormulaError(
                f"{self.definition}: this call was made when the operator had another formula, "
                f"and did not save what {self.title} needs. Register formulas before the forward, "
                "or call the operator again."
            )
        *tensors, found = ctx.saved_tensors
        call, needed = ctx._torchop_call, ctx._torchop_needed
        schema = self.definition.schema
        flat_grads: list[Tensor | None] = []
        for kind, grad in zip(schema.returns, grads, strict=True):
            if isinstance(grad, (list, tuple)):
                flat_grads += grad
            elif "Tensor" in kind:
                flat_grads.append(grad)
        args, kwargs = call.filled(tensors)
        if tracing.is_tracing(tensors) or any(map(functorch.holds_batch, tensors)):
            if self.for_graphs is None:
                raise _second_derivative(self.definition)
            _, backward = self.for_graphs
            found_gradients = backward.overload(flat_grads, found, needed, *args, **kwargs)
        else:
            found_gradients = gradients(
                self.definition,
                call,
                tensors,
                needed,
                flat_grads,
                found,
                create_graph=torch.is_grad_enabled(),
            )
        rest = iter(found_gradients)
        return structured(schema.positional, args, [next(rest) if n else None for n in needed])

    # ----------------------------------------------------------------------------------------------
    # "save": the graph of the body is recorded as if it were called without an operator

    def _record(
        self,
        keyset: DispatchKeySet,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        # Modes, subclasses and transforms see the operator, not what its body consists of.
        if functorch.is_active() or keyset.has(DispatchKey.Python):
            return otherwise()
        self._refuse_effect()
        filled, keywords = self.definition.schema.fill_defaults(args, kwargs)
        call, tensors = taken_apart(filled, keywords)
        needed = [tensor.requires_grad for tensor in tensors]
        entered = iter(_apply(_Entered, *(t for t in tensors if t.requires_grad)))
        inputs = [next(entered) if t.requires_grad else t for t in tensors]
        before = replay.surroundings((*filled, *keywords.values()))
        own, own_keywords = call.filled(inputs)
        result = differentiable(
            self.definition, lambda: body_of(self.definition, own, own_keywords)
        )

        def attached(output: Any, index: int) -> Any:
            if not isinstance(output, Tensor) or output.requires_grad:
                return output
            if not is_differentiable(output):
                return output

            def check() -> None:
                refuse_left_autograd(
                    self.definition, call, tensors, needed, [index], replay.pack(before)
                )

            return _apply(_Unreached, output, first, check)

        first = next(t for t in inputs if t.requires_grad)
        return _map_tensors(result, attached, len(self.definition.schema.returns))

    def _refuse_effect(self) -> None:
        # It may be declared after the formula was derived.
        if self.definition.plan[EffectRule] not in (None, "none"):
            raise DerivedFormulaError(
                f"{self.definition} has an effect by now, and its derived formula would let it "
                "happen again when the body runs again. Register another one, with "
                "register_autograd."
            )


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


class _Entered(torch.autograd.Function):
    """The inputs of a body. PyTorch gives zeros to those that no gradient reaches."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Not views: autograd would follow what is written into the inputs into the body's graph.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _Unreached(torch.autograd.Function):
    """An output that the body computed without its inputs, whose gradient for them is zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, entered: Tensor, check: Callable[[], None]) -> Tensor:
        ctx.check = check
        ctx.save_for_backward(entered)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.check()
        (entered,) = ctx.saved_tensors
        return None, torch.zeros_like(entered), None


def _map_tensors(result: Any, change: Callable[[Any, int], Any], returns: int) -> Any:
    """A result with its tensors replaced by `change(tensor, index)`."""
    indices = itertools.count()
    # Not a function that calls itself: that is a cycle, which keeps tensors until it is collected.
    changed = []
    for value in result if returns > 1 else (result,):
        if isinstance(value, (list, tuple)):
            changed.append([change(item, next(indices)) for item in value])
        elif isinstance(value, Tensor) or value is None:
            changed.append(change(value, next(indices)))
        else:
            changed.append(value)
    return tuple(changed) if returns > 1 else changed[0]


def _second_derivative(definition: Definition) -> DerivedFormulaError:
    return DerivedFormulaError(
        f"{definition}: a derived formula cannot be differentiated again under a compiler. "
        "Differentiate twice in eager mode, or write the formula with register_autograd."
    )
