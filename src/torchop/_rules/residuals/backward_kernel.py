"""The `backward_kernel` option of `register_autograd`.

The option takes a function that computes gradients and turns it into the kernel of a new operator,
`name__backward_kernel`. The names of the function's parameters select the values to save, so no
`setup_context` is needed. Users can register more kernels and rules for the new operator, including
a backward formula for double backward.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._core.call import as_tuple, values_by_name
from torchop._core.definition import Definition
from torchop._errors import MissingFakeError, RuleSignatureError, SchemaError, naming
from torchop._rules.helper_operators import HelperOperator
from torchop._rules.kernels.register import register_kernel
from torchop._rules.layout import LayoutRule
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule
from torchop._schema import signatures, types
from torchop._schema.callables import check_callable
from torchop._schema.convention import Convention
from torchop._schema.declared import declared_schema
from torchop._schema.layouts import check_layouts, declared_layouts
from torchop._schema.naming import OpName
from torchop._schema.schema import Argument, Schema
from torchop._schema.structure import saved
from torchop._schema.structure.gradients import Gradients, GradientsOf
from torchop._schema.structure.nodes import TENSOR_LISTS, Fields, Leaf, Maybe, Node
from torchop._schema.structure.shapes import result_shape

KIND = "backward_kernel"


class BackwardKernel(HelperOperator):
    """The helper operator `name__backward_kernel`."""

    kind = KIND

    def __init__(self, definition: Definition, function: Callable[..., Any]) -> None:
        super().__init__(definition)
        self.what = what = f"{definition}: backward_kernel"
        check_callable(what, function)
        signature = signatures.signature(function)
        schema = definition.schema
        # The indices of the operator's tensor results in the schema. The helper operator takes the
        # gradients of these results as its first arguments.
        self.results = [n for n, kind in enumerate(schema.returns) if "Tensor" in kind]
        # The operator's tensor arguments, in the order in which the helper operator returns their
        # gradients.
        self.differentiated = [a for a in schema.positional if a.holds_tensors]
        parameters = list(signature.parameters.values())
        structured = self._structured_grads(parameters)
        # The types of the backward kernel's first parameters, which receive the gradients.
        self.grads = structured or [p.annotation for p in parameters[: len(self.results)]]
        self.takes_objects = structured is not None
        self.count = len(self.grads)
        if not self.takes_objects and len(parameters) < len(self.results):
            raise RuleSignatureError(
                f"{what} takes {len(parameters)} arguments, but it is called with one gradient for "
                f"each result, {len(self.results)} in total. {definition} is {schema}."
                f"{self._structured_hint()}"
            )
        names = [parameter.name for parameter in parameters]
        self._check_saved(names[self.count :])
        by_name = {n for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
        self.keywords = [name for name in names if name in by_name]
        self.positional = [name for name in names[self.count :] if name not in by_name]
        self.are_optional = self._check_returned(signature.return_annotation)
        self._declare(function, signature)

    def _structured_grads(self, parameters: Sequence[Any]) -> list[Any] | None:
        """Return the annotations of the gradients, if the kernel takes them as structured objects.

        Return None if the kernel takes a separate gradient for each tensor in the results instead.
        """
        structure = self.definition.structure
        if structure is None:
            return None
        results = [(a, node) for a, node in structure.results if node.holds_tensors]
        grads: list[Any] = []
        for (annotation, node), parameter in zip(results, parameters, strict=False):
            if isinstance(node, Leaf):
                grads.append(parameter.annotation)
            elif parameter.annotation == annotation:
                statics_of = structure.layouts and structure.statics_of_layout
                grads.append(GradientsOf(annotation, node, statics_of or None))
        is_structured = any(isinstance(each, GradientsOf) for each in grads)
        return grads if is_structured and len(grads) == len(results) else None

    def _structured_hint(self) -> str:
        structure = self.definition.structure
        if structure is None or not structure.returns_objects:
            return ""
        spelled = ", ".join(types.spell(a) for a, node in structure.results if node.holds_tensors)
        return f" Or annotate the first parameters with the types of the results: {spelled}."

    def _check_saved(self, names: Sequence[str]) -> None:
        schema, declared = self.definition.schema, self.definition.declaration.residuals
        structure = self.definition.structure
        arguments = schema.arguments if structure is None else structure.parameters
        self.arguments = [argument.name for argument in arguments]
        count = structure.result_count if self.takes_objects and structure else len(schema.returns)
        self.outputs = [f"output_{n}" for n in range(count)] if count > 1 else ["output"]
        residuals = () if declared is None else declared.named._fields
        known = (*self.arguments, *residuals, *self.outputs)
        for name in names:
            if name not in known:
                raise RuleSignatureError(
                    f"{self.what}: the parameter {name!r} is not an argument, a residual or the "
                    f"output. The parameters are {self.count} gradient{'s' * (self.count > 1)}, "
                    f"followed by any of {', '.join(known)}."
                )
        self.residuals = [n for n in names if n in residuals and n not in self.arguments]

    def _check_returned(self, returned: Any) -> list[bool]:
        """Check the return annotation. For each gradient, return whether it may be None (zero)."""
        structure = self.definition.structure
        parameters = () if structure is None else structure.positional_parameters
        inputs = [parameter for parameter in parameters if parameter.node.holds_tensors]
        each = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
        self.names = [argument.name for argument in inputs or self.differentiated]
        # The returned class, if it has a field for each argument, or None
        self.by_name: Any = None
        shape = result_shape(returned)
        if shape is not None and set(shape.fields) == set(self.names):
            self.by_name = returned
            each = tuple(shape.fields[name].annotation for name in self.names)
        self.returns_objects = False
        stripped = [types.strip_optional(annotation) for annotation in each]
        if len(each) == len(self.differentiated) and all(
            _returns_gradient_of(kind, argument)
            for (kind, _), argument in zip(stripped, self.differentiated, strict=True)
        ):
            return [is_optional for _, is_optional in stripped]
        given = [
            _gradient_leaves(parameter.node, kind)
            for (kind, _), parameter in zip(stripped, inputs, strict=False)
        ]
        if len(each) == len(inputs) > 0 and None not in given:
            self.returns_objects = True
            leaves = {name for found in given for name in found or ()}
            return [argument.name not in leaves for argument in self.differentiated]
        flat = ", ".join(argument.name for argument in self.differentiated)
        structured = ", ".join(p.name for p in inputs if not isinstance(p.node, Leaf))
        hint = f"For {structured}, use a class with fields of the same names. " * bool(structured)
        raise RuleSignatureError(
            f"{self.what} must be annotated to return a Tensor for each tensor argument "
            f"({flat}), or Tensor | None if None means zeros. For a list of tensors, use "
            f"list[Tensor] or list[Tensor | None]. {hint}Got {types.spell(returned)}."
        )

    def _declare(self, function: Callable[..., Any], signature: Any) -> None:
        each = [list[Tensor] if a.is_tensor_list else Tensor for a in self.differentiated]
        returned = tuple[tuple(each)] if len(each) > 1 else each[0]  # type: ignore[misc]

        kernel = self.fill_zeros(function)
        parameters = list(signature.parameters.values())
        for index, annotation in enumerate(self.grads):
            parameters[index] = parameters[index].replace(annotation=annotation)
        kernel.__signature__ = signature.replace(parameters=parameters, return_annotation=returned)
        name = self.definition.name
        name = name._replace(name=f"{name.name}__{KIND}")
        try:
            with naming(name):
                self.schema, self.kernel, declared = declared_schema(name, kernel, None, (), ())
        except SchemaError as error:
            raise RuleSignatureError(f"{self.what}: {error}") from None
        self.declared_convention = declared
        self.convention = typing.cast(Convention, _ZeroFillingConvention(self))
        with naming(self.what):
            layouts = declared_layouts(signatures.written_annotations(function))
        self.layouts = declared.of_tensors(layouts)
        check_layouts(self.schema, self.layouts)
        returns = self.definition.schema.returns
        grads = [argument.kind for argument in self.schema.positional[: len(self.results)]]
        if not all(map(_is_gradient_of, grads, (returns[place] for place in self.results))):
            raise RuleSignatureError(
                f"{self.what}: the first parameters must be the gradients of the results, "
                "annotated as Tensor, as list[Tensor] for a list, or as Tensor | None for a result "
                f"that may be None. {self.definition} is {self.definition.schema}."
            )
        taken = {argument.name for argument in self.schema.arguments}
        for argument in self.differentiated:
            if _may_hold_none(argument) and argument.name not in taken:
                raise RuleSignatureError(
                    f"{self.what}: {argument.name!r} may contain None, so the number of gradients "
                    f"depends on it. Add the parameter {argument.name!r} to the backward kernel."
                )

    @property
    def origin(self) -> Definition:
        # The operator that runs in the forward pass. The placements of the gradients are derived
        # from its sharding rule.
        if not self.residuals:
            return self.definition
        return typing.cast(
            Definition, self.definition.declaration.residuals.training_form(self.definition).helper
        )

    def named_schema(self, name: OpName) -> Schema:
        return self.schema

    def register_rules(self) -> None:
        self.helper.rule(VmapRule).register(SEQUENTIAL)  # a default that the user can replace

    def define(self) -> bool:
        """Define the operator `name__backward_kernel`.

        If the user has already registered a backward kernel with the same signature, reuse its
        operator and only replace the kernel, because existing compiled graphs may call this
        operator.
        """
        before = self.definition.helpers.get(KIND)
        if before is not None and self._can_replace(before):
            self.helper = before.helper
            register_kernel(self.overload, None, self.kernel)
            if self.layouts:
                self.helper.rule(LayoutRule).register(self.layouts)
            return True
        if before is not None:
            before.helper.deregister(f"{self.definition} has another backward kernel.")
        return super().define() or self.define()  # again if another thread has just defined it

    def _can_replace(self, other: BackwardKernel) -> bool:
        """Return whether this kernel can replace `other` in graphs that were compiled with it."""
        is_flat = not self.declared_convention.structure and not other.declared_convention.structure
        if self.definition is not other.definition or not other.is_registered:
            return False  # the operator was redefined, or `other` deregistered
        one, two = ((k.schema.written, k.are_optional, k.residuals) for k in (self, other))
        return is_flat and one == two

    def fill_zeros(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            gradients = function(*args, **kwargs)
            if self.declared_convention.structure is not None:
                args, kwargs = self.declared_convention.structure.flat_arguments(*args, **kwargs)
            values = values_by_name(self.schema, args, kwargs)
            if type(gradients) is self.by_name:
                gradients = tuple([getattr(gradients, name) for name in self.names])
            if self.returns_objects:
                assert self.definition.structure is not None
                flat = self.definition.structure.spread_gradients(gradients, values)
                gradients = tuple(flat.get(argument.name) for argument in self.differentiated)
            each = gradients if isinstance(gradients, tuple) else (gradients,)
            if len(each) != len(self.differentiated):
                return gradients  # the operator's check of the result will raise
            return self._with_zeros(each, values)

        return kernel

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        taken = {argument.name for argument in self.schema.arguments}
        for argument, is_optional in zip(self.differentiated, self.are_optional, strict=True):
            name = argument.name
            if name not in taken and not is_optional:
                op = f"{self.definition}__{KIND}"
                raise MissingFakeError(
                    f"{op}: no fake kernel is registered, and the default one needs {name!r} to "
                    f"create the gradient. Add the parameter {name!r} to the backward kernel, or "
                    f"register one, torchop.register_fake({op!r}, fake), with the same parameters."
                )
        values = values_by_name(self.schema, args, kwargs)
        return self._with_zeros([None] * len(self.differentiated), values)

    def _with_zeros(self, gradients: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """Replace each gradient that is None with zeros in the shape of the argument.

        A gradient stays None if the backward kernel does not take the argument, because its shape
        is unknown then.
        """
        likes = (values.get(argument.name) for argument in self.differentiated)
        filled = tuple(map(_filled, self.differentiated, gradients, likes))
        return filled if len(filled) > 1 else filled[0]

    def formula(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        self.define()
        helper = self.helper
        count, of_operator = len(self.results), self.definition.convention
        inputs = self.definition.schema.positional
        taken = [argument.name for argument in self.schema.positional[count:]]
        # One pair for each argument that gets a gradient: the position of the argument in `inputs`,
        # and the position of its saved value in `taken`. Only lists that may contain None need the
        # saved value, to find out which items are None, so for all other arguments the second
        # position is None.
        places = [
            (inputs.index(a), taken.index(a.name) if _may_hold_none(a) else None)
            for a in self.differentiated
        ]
        by_position = len(taken)
        by_name = [argument.name for argument in self.schema.keyword_only]
        structure = self.declared_convention.structure
        nodes = [p.node for p in structure.parameters] if structure is not None else []
        layouts = [n.layout.name for n in nodes if isinstance(n, Gradients) and n.layout]

        def save(ctx: Any, inputs: Any, keywords: Any, output: Any, residuals: Any) -> None:
            flat = as_tuple(self.definition.schema, output)
            if self.takes_objects:
                assert self.definition.structure is not None
                output = self.definition.structure.rebuilt_result(output)
            results = output if len(self.outputs) > 1 else (output,)
            objects, named = of_operator.arguments(tuple(inputs), keywords)
            known = dict(zip(self.outputs, results, strict=True))
            known |= {name: getattr(residuals, name) for name in self.residuals}
            known |= {**dict(zip(self.arguments, objects, strict=False)), **named}
            # The forward pass has no gradients yet, so pass None in their place.
            args: Any = (*[None] * self.count, *[known[name] for name in self.positional])
            kwargs = {name: known[name] for name in self.keywords}
            if self.declared_convention.structure is not None:
                args, kwargs = self.declared_convention.structure.flat_arguments(*args, **kwargs)
            kwargs |= dict.fromkeys(layouts, flat[-1])
            saved.save(ctx, (*args[count:], *[kwargs[name] for name in by_name]))

        def backward(ctx: Any, *grads: Any) -> Any:
            values = saved.saved(ctx)
            named = dict(zip(by_name, values[by_position:], strict=True))
            taken_grads = [grads[place] for place in self.results]
            returned = helper.overload(*taken_grads, *values[:by_position], **named)
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


class _ZeroFillingConvention(typing.NamedTuple):
    """The calling convention of backward kernels, which may return None instead of zeros."""

    of: BackwardKernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of.declared_convention, name)

    def kernel(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        is_filled = function is self.of.kernel
        return self.of.declared_convention.kernel(
            function if is_filled else self.of.fill_zeros(function)
        )

    def fake(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        is_declared = getattr(function, "is_declared", False)
        return self.of.declared_convention.fake(
            function if is_declared else self.of.fill_zeros(function)
        )


def _returns_gradient_of(annotation: Any, argument: Argument) -> bool:
    if not argument.is_tensor_list:
        return annotation is Tensor
    item, _ = types.strip_optional(next(iter(typing.get_args(annotation)), None))
    return typing.get_origin(annotation) is list and item is Tensor


def _gradient_leaves(node: Node, annotation: Any) -> set[str] | None:
    """Return the names of the tensors in an argument for which the annotation has a gradient.

    `node` describes the structure of the argument, such as a dataclass. Return None if the
    annotation does not match this structure.
    """
    annotation, _ = types.strip_optional(annotation)
    node = node.inner if isinstance(node, Maybe) else node
    tensors = {leaf.name for leaf in node.leaves() if leaf.is_tensor}
    origin = typing.get_origin(annotation)
    if isinstance(node, Leaf):
        expected = origin is list if node.kind.schema in TENSOR_LISTS else annotation is Tensor
        return tensors if expected else None
    if origin is dict or (origin in (list, tuple) and not isinstance(node, Fields)):
        return tensors
    shape = result_shape(annotation)
    if shape is None or not isinstance(node, Fields) or not set(shape.fields) <= set(node.fields):
        return None
    found: set[str] = set()
    for name, field in shape.fields.items():
        if node.fields[name].holds_tensors:
            leaves = _gradient_leaves(node.fields[name], field.annotation)
            if leaves is None:
                return None
            found |= leaves
    return found


def _is_gradient_of(kind: str, result: str) -> bool:
    # The gradient of a result of type Tuple[Tensor] is a tensor, not a tuple.
    expected = "Tensor" if result == "Tuple[Tensor]" else result
    return kind in (expected, f"Optional[{expected}]")


def _may_hold_none(argument: Argument) -> bool:
    return "List[Optional[" in argument.kind


def _filled(argument: Argument, gradient: Any, like: Any) -> Any:
    """Replace None in the gradient of an argument with zeros. `like` is the argument's value.

    An operator cannot return a list that contains None. So if the argument is a list that contains
    None, the returned list omits the gradients of these items, and `_with_none` inserts them again
    later.
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
    """Insert a gradient of None for each input that is None, because `_filled` omits it."""
    rest = iter(gradients)
    return [None if tensor is None else next(rest) for tensor in inputs or ()]


def _setup_context(
    save: Callable[..., Any], has_keywords: bool, has_residuals: bool
) -> Callable[..., Any]:
    if has_keywords and has_residuals:
        return lambda ctx, inputs, keyword_only_inputs, output, residuals: save(
            ctx, inputs, keyword_only_inputs, output, residuals
        )
    if has_keywords:
        return lambda ctx, inputs, keyword_only_inputs, output: save(
            ctx, inputs, keyword_only_inputs, output, None
        )
    if has_residuals:
        return lambda ctx, inputs, output, residuals: save(ctx, inputs, {}, output, residuals)
    return lambda ctx, inputs, output: save(ctx, inputs, {}, output, None)
