"""The training form: a helper operator that also returns the residuals of an operator.

Residuals are kernel outputs that only the backward pass uses. If a call to the operator `name`
records a gradient, it calls `name__with_residuals` below autograd, so that compiled graphs, modes
and transforms see an ordinary operator whose results include the residuals. The kernel and the fake
kernel of the training form call the original operator and request the residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import compilers, flop_counter, functorch
from torchop._core.call import as_tuple, tensors_in
from torchop._core.contract import storage_of
from torchop._core.definition import CompiledRule, Definition
from torchop._errors import GradientError, MissingFormulaError
from torchop._rules.autograd.constants import constant
from torchop._rules.autograd.formula import Formula
from torchop._rules.autograd.gradients import is_differentiable
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.checkpoint_modes import register_for_checkpoints
from torchop._rules.helper_operators import HelperOperator
from torchop._rules.residuals import modes, vmap
from torchop._rules.residuals.handover import Request, request, requested
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.vmap.rule import VmapRule
from torchop._schema.text import results_of


class WithResiduals(HelperOperator):
    """The training form `name__with_residuals`."""

    kind = "with_residuals"

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self.declared: Any = definition.declaration.residuals
        self.inlined = definition.declaration.inlined
        residuals = results_of(self.declared.schema.written)
        if self.declared.structure is None:  # otherwise there are more results than names
            names = self.declared.named._fields
            residuals = [f"{kind} {name}" for kind, name in zip(residuals, names, strict=True)]
        self.further_results = residuals
        op = str(definition)
        # `guard(places)` returns a function that replaces the saved tensors at these places, which
        # are residuals (kernel outputs for the backward pass), with tensors that raise if they are
        # differentiated. With the cache, calls that save residuals at the same places share this
        # function.
        self.guard = functools.cache(lambda places: functools.partial(_guarded, op, places))
        self.vmap_rule: Any = None
        self.is_counted = False

    def register_rules(self) -> None:
        register_for_checkpoints(self.helper, self.definition.overload)
        for kind in (VmapRule, TorchDispatchRule):
            self.inherit(self.definition.rule(kind))

    def inherit(self, rule: CompiledRule[Any]) -> None:
        if isinstance(rule, VmapRule):
            vmap.follow(self)
        elif isinstance(rule, TorchDispatchRule):
            for cls in rule.functions:
                modes.follow(self, cls)

    @compilers.never_traced
    def kernel(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        schema, call = self.definition.schema, self.definition.overload
        output, request = requested(self.declared, lambda: call(*args, **kwargs))
        flat = self.declared.flat(request)
        self.declared.check_fresh(schema, args, kwargs, output, flat)
        return (*as_tuple(schema, output), *flat)

    def __call__(self, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Call `name__with_residuals`. Return the operator's result and a tuple of residuals."""
        if not self.is_counted and (mode := flop_counter.loaded_mode()) is not None:
            self.is_counted = True
            op = self.definition.overload
            count = flop_counter.counted_for(op, lambda result: self.split(result)[0])
            self.helper.registered.add_default_rule(mode, count)
        return self.split(self.overload(*args, **kwargs))

    def before_kernel(self, inputs: Any, keywords: Any) -> Request:
        return request(self.declared)

    def saving(self, setup: Callable[..., Any]) -> Callable[..., None]:
        declared, schema = self.declared, self.definition.schema

        def save(ctx: Any, inputs: Any, keywords: Any, output: Any, seen: Any) -> None:
            if isinstance(seen, Request):  # a native call, without the dispatcher
                flat = declared.flat(seen)
                declared.check_fresh(schema, inputs, keywords, output, flat)
                given = declared.named(*seen.saved or ())
            else:
                flat, given = seen, declared.rebuilt(seen)
            setup(ctx, inputs, keywords, output, residuals=given)
            self.mark(ctx, flat)

        return save

    def mark(self, ctx: Any, residuals: Sequence[Any]) -> None:
        """Store on `ctx` which saved tensors are residuals, i.e. kernel outputs for backward."""
        # Compare storages, because `setup_context` may save a view of a residual. Inside a
        # functorch transform, tensors have no storage, so compare the tensor objects instead.
        memory = id if functorch.is_active() else storage_of
        given = set(map(memory, tensors_in(residuals)))
        saved = ctx.to_save or ()
        places = tuple([n for n, t in enumerate(saved) if t is not None and memory(t) in given])
        if places:
            ctx._torchop_guard = self.guard(places)
        for name, value in vars(ctx).items():
            if any(memory(t) in given and is_differentiable(t) for t in tensors_in((value,))):
                raise GradientError(
                    f"{self.declared.op}: setup_context stores a residual as ctx.{name}, where "
                    "double backward would treat it as a constant and saved-tensor hooks would "
                    "miss it. Pass it to ctx.save_for_backward."
                )

    def computing(self, setup: Callable[..., Any]) -> Callable[..., None]:
        """Return a `save` function for a forward-mode formula that uses residuals.

        A call in forward mode does not request residuals (extra kernel outputs for the backward
        pass), so the returned function runs the kernel again to compute them.
        """
        return lambda ctx, inputs, keywords, output: setup(
            ctx,
            inputs,
            keywords,
            output,
            residuals=self.declared.rebuilt(self(inputs, keywords)[1]),
        )

    def differentiate(self, backward: Callable[..., Any], setup: Callable[..., Any]) -> None:
        """Register a backward formula for `name__with_residuals`.

        Nested torch.func transforms need this formula: the innermost transform calls
        `name__with_residuals`, so the outer transforms must be able to differentiate this operator.
        """
        count = len(self.definition.schema.returns)

        def save(ctx: Any, inputs: Any, keywords: Any, result: Any, *seen: Any) -> None:
            output, flat = self.split(result)
            # Autograd must not materialize gradients (replace None with zeros), because `gradients`
            # must see whether the gradient of a residual (a kernel output for the backward pass) is
            # None. Instead, `gradients` materializes the gradients of the results itself, unless
            # the user's `setup_context` turns this off with `set_materialize_grads`. `ctx` has no
            # getter for this flag, so intercept the setter.
            materialize = [True]
            ctx.set_materialize_grads = materialize.append
            setup(ctx, inputs, keywords, output, residuals=self.declared.rebuilt(flat))
            del ctx.set_materialize_grads
            ctx.set_materialize_grads(False)
            results = as_tuple(self.definition.schema, output)
            ctx._torchop_zeros = _metadata(results) if materialize[-1] else None

        def gradients(ctx: Any, *grads: Any) -> Any:
            if any(True for _ in tensors_in(grads[count:])):
                raise _through_residual(self.declared.op)
            grads = grads[:count]
            if ctx._torchop_zeros is not None:
                grads = tuple(map(_materialized, grads, ctx._torchop_zeros))
            return backward(ctx, *grads)

        formula = Formula(self.helper, gradients)
        formula.setup = formula.save = save
        self.helper.rule(AutogradRule).update(formula=formula)


def _metadata(output: Any) -> Any:
    if isinstance(output, (list, tuple)):
        return list(map(_metadata, output))
    # Return other values, such as None, unchanged, because they have no gradient to materialize.
    return (output.shape, output.dtype, output.device) if isinstance(output, Tensor) else output


def _materialized(grad: Any, like: Any) -> Any:
    if isinstance(like, list):
        return list(map(_materialized, grad or [None] * len(like), like))
    if grad is not None or not isinstance(like, tuple):
        return grad
    size, dtype, device = like
    return torch.zeros(size, dtype=dtype, device=device)


def _guarded(op: str, places: Sequence[int], ctx: Any, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the saved tensors but replace residuals with tensors that raise if differentiated.

    Without the replacement, a double backward would treat residuals (kernel outputs for the
    backward pass) as constants, and the second derivative would silently be wrong. `places`
    contains the indices of the residuals in `tensors`.
    """
    places = [place for place in places if is_differentiable(tensors[place])]
    if not places:
        return tuple(tensors)
    inputs = [t for place, t in enumerate(tensors) if place not in places and t is not None]
    leaves = [getattr(node, "variable", None) for node, _ in ctx.next_functions]
    anchor = next((t for t in (*inputs, *leaves) if t is not None and t.requires_grad), None)
    if anchor is None:
        raise _through_residual(op)
    return tuple(
        constant(tensor, _through_residual(op), anchor) if place in places else tensor
        for place, tensor in enumerate(tensors)
    )


def _through_residual(op: str) -> MissingFormulaError:
    return MissingFormulaError(
        f"{op}: the second derivative depends on a residual with an unknown derivative. In "
        "backward, if torch.is_grad_enabled(), compute the residual from saved inputs with "
        "differentiable operators; or save inputs too, and call .detach() on the residual if it is "
        "constant."
    )
