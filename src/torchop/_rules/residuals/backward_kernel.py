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
# The attribute of a library that holds the backward kernels, by the name of the operator. They live
# as long as the library.
_ATTRIBUTE = "_torchop_backward_kernels"


class BackwardKernel:
    """What a function of gradients and saved values takes, and the formula that calls it."""

    def __init__(self, definition: Definition, function: Callable[..., Any]) -> None:
        self.definition = definition
        self.what = what = f"{definition}: backward_kernel"
        check_callable(what, function)
        signature = signatures.signature(function)
        schema = definition.schema
        # The places of the results that have a gradient: numbers have none.
        self.results = [n for n, kind in enumerate(schema.returns) if "Tensor" in kind]
        self.count = len(self.results)
        # The arguments that have a gradient, in the order in which the function returns them.
        self.differentiated = [a for a in schema.positional if a.holds_tensors]
        names = list(signature.parameters)
        if len(names) < self.count:
            raise RuleSignatureError(
                f"{what} is called with the gradient of each result, {self.count} here, but takes "
                f"{len(names)} arguments; {definition} is {schema}."
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
        count = len(schema.returns)
        self.outputs = [f"output_{n}" for n in range(count)] if count > 1 else ["output"]
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
        if len(each) != len(self.differentiated) or not all(
            _returns_gradient_of(kind, argument)
            for (kind, _), argument in zip(stripped, self.differentiated, strict=True)
        ):
            names = ", ".join(a.name for a in self.differentiated)
            raise RuleSignatureError(
                f"{self.what} must be annotated to return a Tensor for each tensor of the "
                f"arguments ({names}), or Tensor | None where None stands for zeros, and "
                f"list[Tensor] or list[Tensor | None] for a list; got {types.spell(returned)}."
            )
        return [is_optional for _, is_optional in stripped]

    def _declare(self, function: Callable[..., Any], signature: Any) -> None:
        """Infers the schema of the operator, and how the author's functions for it are called."""
        each = [list[Tensor] if a.is_tensor_list else Tensor for a in self.differentiated]
        returned = tuple[tuple(each)] if len(each) > 1 else each[0]  # type: ignore[misc]

        kernel = self.filling(function)
        kernel.__signature__ = signature.replace(return_annotation=returned)
        name = self.definition.name
        name = name._replace(name=f"{name.name}__{KIND}")
        try:
            self.schema, self.kernel, self.convention = declared_schema(name, kernel, None, (), ())
        except SchemaError as error:
            raise RuleSignatureError(f"{self.what}: {error}") from None
        returns = self.definition.schema.returns
        grads = [argument.kind for argument in self.schema.positional[: self.count]]
        if not all(map(_is_gradient_of, grads, (returns[place] for place in self.results))):
            raise RuleSignatureError(
                f"{self.what}: its first parameters are the gradients of the results, annotated "
                "as Tensor, as list[Tensor] for a list, and as Tensor | None for a result that may "
                f"be None; {self.definition} is {self.definition.schema}."
            )
        taken = {argument.name for argument in self.schema.arguments}
        for argument in self.differentiated:
            if _may_hold_none(argument) and argument.name not in taken:
                raise RuleSignatureError(
                    f"{self.what}: {argument.name!r} may hold None, and its gradient has an entry "
                    "for each tensor in it. Give the backward kernel the parameter "
                    f"{argument.name!r}."
                )

    def define(self) -> Definition:
        """Defines the operator, in place of that of an earlier backward kernel.

        If both take the same, the operator stays, with its other rules, because graphs call it.
        """
        definition = self.definition
        kernels: dict[str, Any] = definition.library.__dict__.setdefault(_ATTRIBUTE, {})
        before = kernels.get(str(definition))
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
        kernels[str(definition)] = companion = define_companion(
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
        if self.definition is not other.definition:  # another library defined the operator again
            return False
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
        inputs = self.definition.schema.positional
        taken = [argument.name for argument in self.schema.positional[count:]]
        # Of each argument that has a gradient, its place, and that of a list that may hold None
        # among the saved values.
        places = [
            (inputs.index(a), taken.index(a.name) if _may_hold_none(a) else None)
            for a in self.differentiated
        ]
        by_position = len(taken)
        by_name = [argument.name for argument in self.schema.keyword_only]

        def save(ctx: Any, inputs: Any, keywords: Any, output: Any, residuals: Any) -> None:
            results = output if len(self.outputs) > 1 else (output,)
            objects, named = of_operator.arguments(tuple(inputs), keywords)
            known = dict(zip(self.outputs, results, strict=True))
            known |= {name: getattr(residuals, name) for name in self.residuals}
            known |= {**dict(zip(self.arguments, objects, strict=False)), **named}
            # The results stand for their gradients, which look like these.
            grads = [results[place] for place in self.results]
            args: Any = (*grads, *[known[name] for name in self.positional])
            kwargs = {name: known[name] for name in self.keywords}
            if self.convention.structure is not None:
                args, kwargs = self.convention.structure.flat_arguments(*args, **kwargs)
            ctx.passed = _saved(ctx, (*args[count:], *[kwargs[name] for name in by_name]))

        def backward(ctx: Any, *grads: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            values = [v.read(saved) if type(v) is _Saved else v for v in ctx.passed]
            named = dict(zip(by_name, values[by_position:], strict=True))
            taken_grads = [grads[place] for place in self.results]
            returned = companion.overload(*taken_grads, *values[:by_position], **named)
            gradients: list[Any] = [None] * len(inputs)
            each = returned if len(places) > 1 else (returned,)
            for (place, saved_place), gradient in zip(places, each, strict=True):
                if saved_place is not None:
                    gradient = _with_none(gradient, values[saved_place])
                needed = ctx.needs_input_grad[place]
                if any(needed) and gradient if isinstance(needed, list) else needed:
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


def _returns_gradient_of(annotation: Any, argument: Argument) -> bool:
    """Return whether an annotation is that of the gradient of an argument."""
    if not argument.is_tensor_list:
        return annotation is Tensor
    item, _ = types.strip_optional(next(iter(typing.get_args(annotation)), None))
    return typing.get_origin(annotation) is list and item is Tensor


def _is_gradient_of(kind: str, result: str) -> bool:
    """Return whether a parameter of this kind takes the gradient of a result of the other kind."""
    expected = "Tensor" if result == "Tuple[Tensor]" else result  # autograd sees the one tensor
    return kind in (expected, f"Optional[{expected}]")


def _may_hold_none(argument: Argument) -> bool:
    """Return whether an argument is a list of tensors in which some may be None."""
    return "List[Optional[" in argument.kind


def _filled(argument: Argument, gradient: Any, like: Any) -> Any:
    """A gradient with zeros for None, as far as it is known what it looks like.

    A list has no entry for an entry of the argument that is None: an operator returns tensors.
    """
    if not argument.is_tensor_list:
        return torch.zeros_like(like) if gradient is None and like is not None else gradient
    if gradient is None:
        gradient = [None] * len(like or ())
    if like is None or len(gradient) != len(like):
        return gradient
    return [
        torch.zeros_like(tensor) if each is None else each
        for each, tensor in zip(gradient, like, strict=True)
        if tensor is not None
    ]


def _with_none(gradients: Sequence[Tensor], inputs: Any) -> list[Tensor | None]:
    """Put None in the place of each input that is None, for which `_filled` has no gradient."""
    rest = iter(gradients)
    return [None if tensor is None else next(rest) for tensor in inputs or ()]


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
