"""Formulas that read data, such as those in NumPy, and those that compilers cannot trace.

Both get the plain tensors of a call in place of DTensors and the like. In place of a formula that
is declared as opaque, compilers and transforms call `name__opaque_backward`. The attributes of
`ctx` are encoded in the arguments of that call, and its kernel decodes them for the formula; so
they have to be of types that a schema has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import compress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchop._compat import compilers, functorch, schemas, tracing
from torchop._core.call import tensors_in
from torchop._core.define import all_or_nothing
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError, GradientError, OpaqueBackwardError
from torchop._rules.autograd.formula import Formula, plain_calls
from torchop._rules.autograd.gradients import (
    Layout,
    flat_gradients,
    flatten,
    in_fresh_memory,
    layout_of,
    placed,
    sums_to,
    unflatten,
)
from torchop._rules.companions import define_companion
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule

_SCHEMA = "(Tensor?[] grad_outputs, Tensor?[] tensors, SymInt[] integers, str context) -> Tensor[]"
# The attribute of a library that holds the backward operators, which live as long as it does.
_ATTRIBUTE = "_torchop_opaque_backward"
# The size, dtype and device of an input that needs a gradient.
_Metadata = tuple[torch.Size, torch.dtype, torch.device]


class PlainFormula(Formula):
    """A formula that cannot read tensors such as DTensors, because it is in NumPy or opaque."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.backward = self._backward
        self.save_plain, self.save = self.save, self._save

    def run(self, ctx: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Makes the call on the plain tensors, if there are others around these."""
        training = self.training
        called = self.definition if training is None else training.companion
        made = (make(called.overload, args, kwargs) for make in plain_calls)
        plain = next((plain for plain in made if plain is not None), None)
        if plain is None:
            return super().run(ctx, args, kwargs, call)
        # Not kept: it leads to the node, and so to `ctx`.
        output, plain.output = plain.output, None
        return output if training is None else training.split(output)[0], None, plain

    def _save(
        self,
        ctx: Any,
        inputs: Any,
        keywords: Any,
        output: Any,
        residuals: Any = None,
        plain: Any = None,
    ) -> None:
        """Shows `setup_context` the plain tensors, if the call was made on these."""
        if plain is not None:
            # Which entries of the gradients belong to tensors.
            values = flatten(inputs, layout_of(ctx.needs_input_grad))
            ctx._torchop_plain = plain, [isinstance(value, Tensor) for value in values]
            inputs, keywords = self.definition.schema.fill_defaults(plain.args, plain.kwargs)
            output = plain.result
            if self.training is not None:
                output, residuals = self.training.split(output)
            plain.forget()  # the node keeps only what is saved
        if self.save_plain is not None:
            more = () if self.training is None else (residuals,)
            self.save_plain(ctx, inputs, keywords, output, *more)

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
        flat = [next(gradients) if is_tensor else None for is_tensor in of_tensors]
        return unflatten(flat, inputs)

    def _gradients(self, ctx: Any, *grads: Any) -> Any:
        assert self.function is not None  # a user wrote it
        return self.function(ctx, *grads)


class OpaqueFormula(PlainFormula):
    """A formula that calls the function of a user, or where it is traced, an operator for it."""

    title = "autograd (opaque)"
    cache_part = title  # graphs call it as an operator

    def __init__(self, definition: Definition, function: Callable[..., Any], *more: Any) -> None:
        super().__init__(definition, function, *more)
        # One operator for all formulas that are registered in turn, because graphs know its name.
        operators: dict[str, _Operator] = definition.library.__dict__.setdefault(_ATTRIBUTE, {})
        operator = operators.get(str(definition))
        if operator is not None and operator.definition is not definition:
            # Another library defined the operator again, with another schema.
            operator.companion.end(f"{definition} was defined again.")
            operator = None
        if operator is None:
            operator = operators[str(definition)] = _Operator(definition, function)
        operator.function = function
        self.companion = operator.companion

    def run(self, ctx: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Makes the call, and saves the metadata of the gradients that the inputs need."""
        result, *seen = super().run(ctx, args, kwargs, call)
        if len(seen) > 1:  # a call on plain tensors
            args, kwargs = seen[1].args, seen[1].kwargs
        filled, _ = self.definition.schema.fill_defaults(args, kwargs)
        # In the backward, where the fake kernel has to describe the gradients, the inputs are gone.
        if _is_traced(list(tensors_in(filled))):
            layout = layout_of(ctx.needs_input_grad)
            tensors = compress(flatten(filled, layout), flatten(ctx.needs_input_grad, layout))
            ctx._torchop_metadata = [(t.shape, t.dtype, t.device) for t in tensors]
        return result, *seen

    def _gradients(self, ctx: Any, *grads: Any) -> Any:
        metadata = getattr(ctx, "_torchop_metadata", None)
        layout = layout_of(grads)
        flat = flatten(grads, layout)
        if metadata is None or not _is_traced(list(tensors_in(flat))):
            return super()._gradients(ctx, *grads)
        context = _write(self.definition, ctx, layout, metadata)
        return placed(self.companion.overload(flat, *context), ctx.needs_input_grad)


def _is_traced(tensors: Sequence[Tensor]) -> bool:
    """Whether a compiler, or a transform of `torch.func`, follows the operators that run here."""
    return functorch.is_active() or tracing.is_tracing(tensors)


class _Operator:
    """The backward operator, which calls the formula that was registered last."""

    __slots__ = ("companion", "definition", "function")

    def __init__(self, definition: Definition, function: Callable[..., Any]) -> None:
        self.definition = definition
        self.function = function
        self.companion = all_or_nothing(definition, self._define)

    def _define(self) -> Definition:
        companion = define_companion(
            self.definition,
            "opaque_backward",
            _SCHEMA,
            self.backward,
            _fake,
            error=DerivedFormulaError,
        )
        # A formula that cannot be traced cannot be batched either.
        companion.rule(VmapRule).register(SEQUENTIAL)
        return companion

    @compilers.never_traced
    def backward(
        self,
        grads: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        integers: Sequence[int],
        context: str,
    ) -> list[Tensor]:
        """The kernel: the gradients that are needed, like those of the fake kernel."""
        ctx, lengths, metadata = _read(context, tensors, integers)
        needed = ctx.needs_input_grad
        layout = layout_of(needed)
        result = self.function(ctx, *unflatten(grads, lengths))
        flat = flat_gradients(self.definition, result, layout, needed)
        likes = _empty(metadata)
        gradients = map(self._fitted, compress(flat, flatten(needed, layout)), likes)
        return in_fresh_memory(gradients, likes, (*grads, *tensors))

    def _fitted(self, gradient: Tensor | None, like: Tensor) -> Tensor:
        """A gradient with the shape, dtype and device of that of the fake kernel."""
        if gradient is None:
            return like.zero_()
        if not sums_to(like.shape, gradient.shape) or gradient.is_complex() > like.is_complex():
            raise GradientError(
                f"{self.definition}: backward returned a gradient of shape {list(gradient.shape)} "
                f"and {gradient.dtype} for an input of shape {list(like.shape)} and {like.dtype}."
            )
        # PyTorch's engine does the same for gradients of a formula that is no operator.
        return gradient.sum_to_size(like.shape).detach().to(like.device, like.dtype)


def _fake(grads: Any, tensors: Any, integers: Any, context: str) -> list[Tensor]:
    return _empty(_read(context, tensors, integers)[2])


def _empty(metadata: Sequence[_Metadata]) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype, device=device) for size, dtype, device in metadata]


# --------------------------------------------------------------------------------------------------
# The attributes of ctx as arguments of an operator


def _write(
    definition: Definition, ctx: Any, layout: Layout | None, metadata: list[_Metadata]
) -> tuple[list[Tensor | None], list[Any], str]:
    """Encodes a `ctx`: its tensors, its (symbolic) integers, and the rest as a string."""
    tensors: list[Tensor | None] = []
    integers: list[Any] = []

    def encoded(name: str, value: Any) -> Any:
        # A member of an Enum may be a number or a string, and would be no member in the formula.
        kind = Enum if isinstance(value, Enum) else type(value)
        if value is None or issubclass(kind, (bool, str, float)):
            return value
        if issubclass(kind, Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        # Not in the text: the graph may be compiled once for all values of a symbol.
        if issubclass(kind, (int, torch.SymInt)):
            integers.append(value)
            return {"integer": len(integers) - 1}
        if issubclass(kind, (torch.dtype, torch.device)):
            return {kind.__name__: str(value)}
        if kind is list:
            return [encoded(name, item) for item in value]
        if kind in (tuple, torch.Size):
            return {kind.__name__: [encoded(name, item) for item in value]}
        raise OpaqueBackwardError(
            f"{definition}: the formula is opaque, so a compiler calls its backward as an "
            f"operator. ctx.{name} is an argument of that operator, so it must be a tensor, an "
            "int, float, bool or str, None, a dtype or device, or a tuple or list of these. Got a "
            f"{type(value).__name__}. Save its parts, and rebuild it in backward."
        )

    attributes = {n: v for n, v in vars(ctx).items() if not n.startswith("_torchop_")}
    attributes["needs_input_grad"] = ctx.needs_input_grad
    attributes["saved_tensors"] = ctx.saved_tensors
    values = [(name, encoded(name, value)) for name, value in attributes.items()]
    like = encoded("needs_input_grad", metadata)
    return tensors, integers, json.dumps([layout, values, like])


def _read(
    text: str, tensors: Sequence[Tensor | None], integers: Sequence[int]
) -> tuple[SimpleNamespace, list[int | None] | None, list[_Metadata]]:
    """Decodes what `_write` encoded.

    That is a `ctx`, the lengths of gradients that are lists, and what the gradients look like.
    """
    decoders: dict[str, Callable[[Any], Any]] = {
        "tensor": tensors.__getitem__,
        "integer": integers.__getitem__,
        "dtype": lambda name: schemas.dtypes()[name.removeprefix("torch.")],
        "device": torch.device,
        "tuple": tuple,
        "Size": torch.Size,
    }

    def decoded(value: dict[str, Any]) -> Any:
        ((kind, content),) = value.items()  # in which all is decoded
        return decoders[kind](content)

    lengths, attributes, metadata = json.loads(text, object_hook=decoded)
    return SimpleNamespace(**dict(attributes)), lengths, metadata
