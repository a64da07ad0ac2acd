"""Backward kernels: the gradients of an operator from one function, itself an operator.

The names of the function's parameters say what a call saves for it, so no `setup_context` is
written. The operator, `name__backward_kernel`, has kernels, rules and a place in profiles like any
other. Without a formula of its own, a second derivative raises the error of such operators.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchop._core.definition import Definition
from torchop._errors import MissingFakeError, RuleSignatureError, SchemaError
from torchop._rules.companions import define_companion
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule
from torchop._schema import signatures, types
from torchop._schema.callables import RESIDUALS, check_callable
from torchop._schema.infer import infer_schema
from torchop._schema.text import write_results

KIND = "backward_kernel"
# The attribute of a library that holds the operator, which lives as long as it does.
_ATTRIBUTE = "_torchop_backward_kernel"


class BackwardKernel:
    """What a function of gradients and saved values takes, and the formula that calls it."""

    def __init__(self, definition: Definition, function: Callable[..., Any]) -> None:
        self.definition = definition
        self.function = function
        what = f"{definition}: backward_kernel"
        check_callable(what, function)
        self.signature = signatures.signature(function)
        names = list(self.signature.parameters)
        count = len(definition.schema.returns)
        self.saved_names = names[count:]
        self.sources = {name: self._source(what, name) for name in self.saved_names}
        self.asks_for_residuals = RESIDUALS in {kind for kind, _ in self.sources.values()}
        # The arguments that have a gradient, in the order in which the function returns them.
        self.differentiated = [a for a in definition.schema.positional if a.holds_tensors]
        lists = [a.name for a in self.differentiated if a.is_tensor_list]
        kinds = [kind for kind in definition.schema.returns if kind != "Tensor"]
        if lists or kinds or len(names) < count:
            raise RuleSignatureError(
                f"{what} is called with a gradient for each result, which have to be tensors, and "
                f"returns one for each tensor of the arguments, without lists; {definition} is "
                f"{definition.schema}. Write the formula with backward and setup_context."
            )
        returned = self.signature.return_annotation
        each = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
        wrong = [types.spell(a) for a in each if types.strip_optional(a)[0] is not Tensor]
        if wrong or len(each) != len(self.differentiated):
            expected = ", ".join(a.name for a in self.differentiated)
            raise RuleSignatureError(
                f"{what} must be annotated to return a Tensor for each tensor of the arguments "
                f"({expected}), or Tensor | None where None stands for zeros; got "
                f"{types.spell(returned)}."
            )
        self.are_optional = [types.strip_optional(annotation)[1] for annotation in each]
        self.schema = self._schema(what)

    def _source(self, what: str, name: str) -> tuple[str, Any]:
        """Where a parameter comes from: an argument, the output, or a residual."""
        schema, declared = self.definition.schema, self.definition.declaration.residuals
        count = len(schema.returns)
        outputs = [f"output_{index}" for index in range(count)] if count > 1 else ["output"]
        residuals = () if declared is None else declared.named._fields
        arguments = [argument.name for argument in schema.arguments]
        if name in arguments:
            return "argument", name
        if name in residuals:
            return RESIDUALS, name
        if name in outputs:
            return "output", outputs.index(name)
        raise RuleSignatureError(
            f"{what}: the parameter {name!r} is neither an argument, nor a residual, nor the "
            f"output. It is called with {count} gradient{'s' * (count > 1)}, and then with what "
            f"it names of {', '.join((*arguments, *residuals, *outputs))}."
        )

    def _schema(self, what: str) -> str:
        def kernel() -> None: ...

        results = ["Tensor"] * len(self.differentiated)
        kernel.__signature__ = self.signature.replace(return_annotation=None)  # type: ignore[attr-defined]
        try:
            text = infer_schema(kernel, mutates_args=())
        except SchemaError as error:
            raise RuleSignatureError(f"{what}: {error}") from None
        return text.removesuffix("()") + write_results(results)

    def define(self) -> Definition:
        """Defines the operator, in place of that of an earlier backward kernel."""
        attributes: dict[str, Any] = self.definition.library.__dict__
        before = attributes.pop(_ATTRIBUTE, None)
        if before is not None:
            before.end(f"{self.definition} has another backward kernel.")
        attributes[_ATTRIBUTE] = companion = define_companion(
            self.definition, KIND, self.schema, self._kernel, self._fake
        )
        companion.rule(VmapRule).register(SEQUENTIAL)  # until the author registers a better one
        return companion

    def _kernel(self, *args: Any, **kwargs: Any) -> Any:
        gradients = self.function(*args, **kwargs)
        likes = self._likes(args, kwargs)
        if not isinstance(gradients, tuple) or len(gradients) != len(likes):
            return gradients  # one, or what the check of results refuses
        return tuple(
            torch.zeros_like(like) if gradient is None and like is not None else gradient
            for gradient, like in zip(gradients, likes, strict=True)
        )

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        likes = self._likes(args, kwargs)
        for argument, is_optional in zip(self.differentiated, self.are_optional, strict=True):
            name = argument.name
            if name not in self.signature.parameters and not is_optional:
                op = f"{self.definition}__{KIND}"
                raise MissingFakeError(
                    f"{op}: the gradient of {name!r} looks like {name!r}, which "
                    "the backward kernel does not take. Give it this parameter, or write "
                    f"torchop.register_fake({op!r}, fake), with the parameters of the kernel."
                )
        gradients = tuple(None if like is None else torch.empty_like(like) for like in likes)
        return gradients if len(gradients) > 1 else gradients[0]

    def _likes(self, args: Any, kwargs: Any) -> list[Tensor | None]:
        """The argument that each gradient looks like; None if there is none, or it is not taken."""
        values = {**dict(zip(self.signature.parameters, args, strict=False)), **kwargs}
        return [values.get(argument.name) for argument in self.differentiated]

    def formula(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The backward and the `setup_context` of the operator, on arguments of its schema."""
        companion = self.define()
        schema, sources = self.definition.schema, tuple(self.sources.values())
        of_gradients = [schema.positional.index(argument) for argument in self.differentiated]
        names = [argument.name for argument in schema.positional]
        several = len(schema.returns) > 1

        def save(ctx: Any, inputs: Any, keywords: Any, output: Any, residuals: Any) -> None:
            given: dict[str, Any] = {
                "argument": {**dict(zip(names, inputs, strict=True)), **keywords},
                "output": output if several else (output,),
            }
            values = [
                getattr(residuals, name) if kind == RESIDUALS else given[kind][name]
                for kind, name in sources
            ]
            are_saved = [value is None or isinstance(value, Tensor) for value in values]
            ctx.save_for_backward(*itertools.compress(values, are_saved))
            ctx.passed = [
                _SAVED if is_saved else value
                for value, is_saved in zip(values, are_saved, strict=True)
            ]

        def backward(ctx: Any, *grads: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            values = [next(saved) if value is _SAVED else value for value in ctx.passed]
            returned = companion.overload(*grads, *values)
            gradients = [None] * len(names)
            each = returned if len(of_gradients) > 1 else (returned,)
            for place, gradient in zip(of_gradients, each, strict=True):
                gradients[place] = gradient if ctx.needs_input_grad[place] else None
            return tuple(gradients)

        return backward, _setup_context(save, bool(schema.keyword_only), self.asks_for_residuals)


_SAVED = object()  # stands for a saved tensor, or None


def _setup_context(save: Callable[..., Any], has_keywords: bool, asks: bool) -> Callable[..., Any]:
    if has_keywords and asks:
        return lambda ctx, inputs, keyword_only_inputs, output, residuals: save(
            ctx, inputs, keyword_only_inputs, output, residuals
        )
    if has_keywords:
        return lambda ctx, inputs, keyword_only_inputs, output: save(
            ctx, inputs, keyword_only_inputs, output, None
        )
    if asks:
        return lambda ctx, inputs, output, residuals: save(ctx, inputs, {}, output, residuals)
    return lambda ctx, inputs, output: save(ctx, inputs, {}, output, None)
