"""A backward that compilers cannot trace, as an operator.

Compilers and transforms call `name__opaque_backward`. The attributes of `ctx` are encoded in the
arguments of that call, and its kernel decodes them for the formula; so they have to be of types
that a schema has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import compress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchop._compat import compilers, functorch, tracing
from torchop._core.call import tensors_in
from torchop._core.contract import storage_of
from torchop._core.define import all_or_nothing
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError, GradientError, OpaqueBackwardError
from torchop._rules.autograd.formula import SetupContext
from torchop._rules.autograd.gradients import (
    Layout,
    flat_gradients,
    flatten,
    in_fresh_memory,
    layout_of,
    placed,
    unflatten,
)
from torchop._rules.autograd.plain_tensors import PlainFormula
from torchop._rules.companions import define_companion
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule

_SCHEMA = "(Tensor?[] grad_outputs, Tensor?[] tensors, SymInt[] integers, str context) -> Tensor[]"
# The attribute of a library that holds the backward operators, which live as long as it does.
_ATTRIBUTE = "_torchop_opaque_backward"
# The size, dtype and device of an input that needs a gradient.
_Metadata = tuple[torch.Size, torch.dtype, torch.device]


class OpaqueFormula(PlainFormula):
    """A formula that calls the function of a user, or where it is traced, an operator for it."""

    title = "autograd (opaque)"
    cache_part = title  # graphs call it as an operator

    def __init__(
        self,
        definition: Definition,
        function: Callable[..., Any],
        setup_context: SetupContext | None,
    ) -> None:
        super().__init__(definition, function, setup_context)
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
        result, *plain = super().run(ctx, args, kwargs, call)
        if plain:
            args, kwargs = plain[0].args, plain[0].kwargs
        filled, _ = self.definition.schema.fill_defaults(args, kwargs)
        if _is_traced(list(tensors_in(filled))):
            layout = layout_of(ctx.needs_input_grad)
            tensors = compress(flatten(filled, layout), flatten(ctx.needs_input_grad, layout))
            ctx._torchop_metadata = [(t.shape, t.dtype, t.device) for t in tensors]
        return result, *plain

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
        gradients = compress(
            flat_gradients(self.definition, result, layout, needed), flatten(needed, layout)
        )
        storages = {storage_of(tensor) for tensor in tensors_in((*grads, *tensors))}
        return [
            _fresh(self.definition, gradient, like, storages)
            for gradient, like in zip(gradients, _empty(metadata), strict=True)
        ]


def _fake(grads: Any, tensors: Any, integers: Any, context: str) -> list[Tensor]:
    return _empty(_read(context, tensors, integers)[2])


def _empty(metadata: Sequence[_Metadata]) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype, device=device) for size, dtype, device in metadata]


def _fresh(
    definition: Definition, gradient: Tensor | None, like: Tensor, storages: set[int]
) -> Tensor:
    """A gradient like that of the fake kernel, in memory that nothing else has."""
    if gradient is None:
        return like.zero_()
    if gradient.shape != like.shape:
        # PyTorch's engine does the same for gradients of a formula that is no operator.
        try:
            gradient = gradient.sum_to_size(like.shape)
        except RuntimeError:
            raise GradientError(
                f"{definition}: backward returned a gradient of shape {list(gradient.shape)} for "
                f"an input of shape {list(like.shape)}."
            ) from None
    return in_fresh_memory(gradient.detach().to(like.device, like.dtype), like, storages)


# --------------------------------------------------------------------------------------------------
# The attributes of ctx as arguments of an operator


def _write(
    definition: Definition, ctx: Any, layout: Layout | None, metadata: list[_Metadata]
) -> tuple[list[Tensor | None], list[Any], str]:
    """Encodes a `ctx`: its tensors, its (symbolic) integers, and the rest as a string."""
    tensors: list[Tensor | None] = []
    integers: list[Any] = []

    def encoded(name: str, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str, float)):
            return value
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if isinstance(value, (int, torch.SymInt)):
            integers.append(value)
            return {"integer": len(integers) - 1}
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value)}
        if type(value) in (tuple, list, torch.Size):
            return {type(value).__name__: [encoded(name, item) for item in value]}
        raise OpaqueBackwardError(
            f"{definition}: the formula is opaque, so a compiler calls its backward as an "
            f"operator. ctx.{name} is an argument of that operator, so it must be a tensor, an "
            "int, float, bool or str, None, a dtype or device, or a tuple or list of these. Got a "
            f"{type(value).__name__}. Save its parts, and rebuild it in backward."
        )

    attributes = {n: v for n, v in vars(ctx).items() if not n.startswith("_torchop_")}
    attributes["needs_input_grad"] = ctx.needs_input_grad
    attributes["saved_tensors"] = ctx.saved_tensors
    values = {name: encoded(name, value) for name, value in attributes.items()}
    like = encoded("needs_input_grad", metadata)
    return tensors, integers, json.dumps({"grads": layout, "ctx": values, "like": like})


def _read(
    text: str, tensors: Sequence[Tensor | None], integers: Sequence[int]
) -> tuple[SimpleNamespace, list[int | None] | None, list[_Metadata]]:
    """Decodes what `_write` encoded.

    That is a `ctx`, the lengths of gradients that are lists, and what the gradients look like.
    """
    values = json.loads(text)

    def decoded(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        return decoders[kind](content)

    decoders: dict[str, Callable[[Any], Any]] = {
        "tensor": tensors.__getitem__,
        "integer": integers.__getitem__,
        "dtype": _dtype,
        "device": torch.device,
        "tuple": lambda items: tuple(map(decoded, items)),
        "list": lambda items: list(map(decoded, items)),
        "Size": lambda items: torch.Size(map(decoded, items)),
    }
    ctx = SimpleNamespace(**{n: decoded(v) for n, v in values["ctx"].items()})
    return ctx, values["grads"], decoded(values["like"])


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
