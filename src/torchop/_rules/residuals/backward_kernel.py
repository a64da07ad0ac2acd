"""Backward kernels: the gradients of an operator from one function, itself an operator.

The names of the function's parameters say what a call saves for it, so no `setup_context` is
written. The operator, `name__backward_kernel`, has kernels, rules and a place in profiles like any
other. Without a formula of its own, a second derivative raises the error of such operators.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._core.definition import Definition
from torchop._errors import MissingFakeError, RuleSignatureError, SchemaError
from torchop._rules.companions import define_companion
from torchop._rules.kernels.register import register_kernel
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule
from torchop._schema import signatures, types
from torchop._schema.callables import check_callable
from torchop._schema.convention import Convention
from torchop._schema.declared import declared_schema
from torchop._schema.schema import Argument

KIND = "backward_kernel"
# The attribute of a library that holds the operator, which lives as long as it does.
_ATTRIBUTE = "_torchop_backward_kernel"
_LIST = "List[Tensor]"


class BackwardKernel:
    """What a function of gradients and saved values takes, and the formula that calls it."""

    def __init__(self, definition: Definition, function: Callable[..., Any]) -> None:
        self.definition = definition
        self.what = what = f"{definition}: backward_kernel"
        check_callable(what, function)
        signature = signatures.signature(function)
        schema = definition.schema
        self.count = len(schema.returns)
        # The arguments that have a gradient, in the order in which the function returns them.
        self.differentiated = [a for a in schema.positional if a.holds_tensors]
        with_none = any("List[Optional[" in a.kind for a in self.differentiated)
        names = list(signature.parameters)
        if with_none or {*schema.returns} - {"Tensor", _LIST} or len(names) < self.count:
            raise RuleSignatureError(
                f"{what} is called with a gradient for each result, which have to be tensors or "
                "lists of tensors, and returns one for each tensor of the arguments, of which no "
                f"list may hold None; {definition} is {schema}. Write the formula with backward "
                "and setup_context."
            )
        self._check_saved(names[self.count :])
        by_name = {n for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
        self.keywords = [name for name in names if name in by_name]
        self.positional = [name for name in names[self.count :] if name not in by_name]
        self.are_optional = self._check_returned(signature.return_annotation)
        self._declare(function, signature)

    def _check_saved(self, names: Sequence[str]) -> None:
        """Refuses parameters that are neither an argument, the output, nor a residual."""
        schema, declared = self.definition.schema, self.definition.declaration.residuals
        structure = self.definition.structure
        arguments = schema.arguments if structure is None else structure.parameters
        self.arguments = [argument.name for argument in arguments]
        self.outputs = [f"output_{n}" for n in range(self.count)] if self.count > 1 else ["output"]
        residuals = () if declared is None else declared.named._fields
        known = (*self.arguments, *residuals, *self.outputs)
        for name in names:
            if name not in known:
                raise RuleSignatureError(
                    f"{self.what}: the parameter {name!r} is neither an argument, nor a residual, "
                    f"nor the output. It is called with {self.count} "
                    f"gradient{'s' * (self.count > 1)}, and then with what it names of "
                    f"{', '.join(known)}."
                )
        self.residuals = [n for n in names if n in residuals and n not in self.arguments]

    def _check_returned(self, returned: Any) -> list[bool]:
        """Whether None may stand for zeros, for each of the gradients."""
        each = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
        stripped = [types.strip_optional(annotation) for annotation in each]
        if [types.return_type(kind) for kind, _ in stripped] != [
            *map(_result, self.differentiated)
        ]:
            expected = ", ".join(a.name for a in self.differentiated)
            raise RuleSignatureError(
                f"{self.what} must be annotated to return a Tensor for each tensor of the "
                f"arguments ({expected}), or Tensor | None where None stands for zeros, and "
                f"list[Tensor] for a list; got {types.spell(returned)}."
            )
        return [is_optional for _, is_optional in stripped]

    def _declare(self, function: Callable[..., Any], signature: Any) -> None:
        """Infers the schema of the operator, and how the author's functions for it are called."""
        kinds = [list[Tensor] if a.is_tensor_list else Tensor for a in self.differentiated]
        returned = tuple[tuple(kinds)] if len(kinds) > 1 else kinds[0]  # type: ignore[misc]

        kernel = self.filling(function)
        kernel.__signature__ = signature.replace(return_annotation=returned)
        name = self.definition.name
        name = name._replace(name=f"{name.name}__{KIND}")
        try:
            self.schema, self.kernel, self.convention = declared_schema(name, kernel, None, (), ())
        except SchemaError as error:
            raise RuleSignatureError(f"{self.what}: {error}") from None
        lists = [a.is_tensor_list for a in self.schema.positional[: self.count]]
        if lists != [kind == _LIST for kind in self.definition.schema.returns]:
            raise RuleSignatureError(
                f"{self.what}: its first parameters are the gradients of the results, annotated "
                f"as Tensor, and as list[Tensor] for a list; {self.definition} is "
                f"{self.definition.schema}."
            )

    def define(self) -> Definition:
        """Defines the operator, in place of that of an earlier backward kernel.

        If both take the same, the operator stays, with its other rules, because graphs call it.
        """
        definition = self.definition
        attributes: dict[str, Any] = definition.library.__dict__
        before = attributes.get(_ATTRIBUTE)
        if before is not None and self._takes_the_place_of(before.convention.of):
            register_kernel(before.overload, None, self.kernel)
            return typing.cast(Definition, before)
        if before is not None:
            before.end(f"{definition} has another backward kernel.")
        # The calls that it is the backward of, by whose sharding rule gradients are placed.
        origin = definition
        if self.residuals:
            origin = definition.declaration.residuals.training_form(definition).companion
        text = self.schema.written
        attributes[_ATTRIBUTE] = companion = define_companion(
            definition,
            KIND,
            text[text.index("(") :],
            self.kernel,
            self._fake,
            origin=origin,
            convention=typing.cast(Convention, _Filling(self)),
        )
        companion.rule(VmapRule).register(SEQUENTIAL)  # until the author registers a better one
        return companion

    def _takes_the_place_of(self, other: BackwardKernel) -> bool:
        """Whether compiled graphs, which call the operator of another one, can run this one."""
        is_flat = self.convention.structure is other.convention.structure is None
        one, two = ((k.schema.written, k.are_optional, k.residuals) for k in (self, other))
        return is_flat and one == two

    def filling(self, function: Callable[..., Any]) -> Any:
        """A kernel that returns what the author's does, with zeros for None."""

        @functools.wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            gradients = function(*args, **kwargs)
            if self.convention.structure is not None:
                args, kwargs = self.convention.structure.flat_arguments(*args, **kwargs)
            each = gradients if isinstance(gradients, tuple) else (gradients,)
            if len(each) != len(self.differentiated):
                return gradients  # what the check of results refuses
            return self._with_zeros(each, args, kwargs)

        return kernel

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        taken = {argument.name for argument in self.schema.arguments}
        for argument, is_optional in zip(self.differentiated, self.are_optional, strict=True):
            name = argument.name
            if name not in taken and not is_optional:
                op = f"{self.definition}__{KIND}"
                raise MissingFakeError(
                    f"{op}: the gradient of {name!r} looks like {name!r}, which "
                    "the backward kernel does not take. Give it this parameter, or write "
                    f"torchop.register_fake({op!r}, fake), with the parameters of the kernel."
                )
        return self._with_zeros([None] * len(self.differentiated), args, kwargs)

    def _with_zeros(self, gradients: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """Gradients without None, as far as the arguments that they look like are taken."""
        names = (argument.name for argument in self.schema.positional)
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        likes = (values.get(argument.name) for argument in self.differentiated)
        filled = tuple(map(_filled, self.differentiated, gradients, likes))
        return filled if len(filled) > 1 else filled[0]

    def formula(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The backward and the `setup_context` of the operator, on arguments of its schema."""
        companion = self.define()
        count, of_operator = self.count, self.definition.convention
        places = [
            (self.definition.schema.positional.index(a), a.is_tensor_list)
            for a in self.differentiated
        ]
        inputs_count = len(self.definition.schema.positional)
        by_position = len(self.schema.positional) - count
        by_name = [argument.name for argument in self.schema.keyword_only]

        def save(ctx: Any, inputs: Any, keywords: Any, output: Any, residuals: Any) -> None:
            results = output if count > 1 else (output,)
            objects, named = of_operator.arguments(tuple(inputs), keywords)
            known = dict(zip(self.outputs, results, strict=True))
            known |= {name: getattr(residuals, name) for name in self.residuals}
            known |= {**dict(zip(self.arguments, objects, strict=False)), **named}
            args: Any = (*results, *[known[name] for name in self.positional])
            kwargs = {name: known[name] for name in self.keywords}
            if self.convention.structure is not None:
                args, kwargs = self.convention.structure.flat_arguments(*args, **kwargs)
            ctx.passed = _saved(ctx, (*args[count:], *[kwargs[name] for name in by_name]))

        def backward(ctx: Any, *grads: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            values = [v.read(saved) if type(v) is _Saved else v for v in ctx.passed]
            named = dict(zip(by_name, values[by_position:], strict=True))
            returned = companion.overload(*grads, *values[:by_position], **named)
            gradients: list[Any] = [None] * inputs_count
            each = returned if len(places) > 1 else (returned,)
            for (place, is_list), gradient in zip(places, each, strict=True):
                needed = ctx.needs_input_grad[place]
                if any(needed or ()) and gradient if is_list else needed:
                    gradients[place] = gradient
            return tuple(gradients)

        has_keywords = bool(self.definition.schema.keyword_only)
        return backward, _setup_context(save, has_keywords, bool(self.residuals))


class _Filling(typing.NamedTuple):
    """The convention of the operator; None stands for zeros in kernels that are registered too."""

    of: BackwardKernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of.convention, name)

    def kernel(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        is_filled = function is self.of.kernel
        return self.of.convention.kernel(function if is_filled else self.of.filling(function))

    def fake(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        is_declared = getattr(function, "is_declared", False)
        return self.of.convention.fake(function if is_declared else self.of.filling(function))


def _result(argument: Argument) -> str:
    return "Tensor[]" if argument.is_tensor_list else "Tensor"


def _filled(argument: Argument, gradient: Any, like: Any) -> Any:
    """A gradient with zeros for None, as far as it is known what it looks like."""
    if not argument.is_tensor_list:
        return torch.zeros_like(like) if gradient is None and like is not None else gradient
    if gradient is None:
        return [torch.zeros_like(tensor) for tensor in like or ()]
    if like is None or len(gradient) != len(like):
        return gradient
    return [
        torch.zeros_like(tensor) if each is None else each
        for each, tensor in zip(gradient, like, strict=True)
    ]


class _Saved(typing.NamedTuple):
    """Stands for a saved tensor, or for a list of so many."""

    length: int | None

    def read(self, tensors: Any) -> Any:
        if self.length is None:
            return next(tensors)
        return [next(tensors) for _ in range(self.length)]


_TENSOR = _Saved(None)


def _saved(ctx: Any, values: Sequence[Any]) -> list[Any]:
    """Saves the tensors among values; returns these with what stands for them."""
    tensors: list[Any] = []
    passed: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            passed.append(_TENSOR)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            tensors.extend(value)
            passed.append(_Saved(len(value)))
        else:
            passed.append(value)
    ctx.save_for_backward(*tensors)
    return passed


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
