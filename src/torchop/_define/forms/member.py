"""One form of an operator beside its functional one: what both share, and how compilers see it.

Compilers see what they see of PyTorch's own forms: the functional operator, and a copy into the
tensor that is written. So there is nothing that a form could do wrong under compilation, in any
release, and a formula or a fake kernel of the functional operator serves all forms.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.library
from torch import Tensor

from torchop._compat.classes import FunctionalTensorMode, Tag
from torchop._core.contract import returned_arguments, returned_result
from torchop._core.declaration import Declaration, Guard
from torchop._core.define import all_or_nothing, define, end_with
from torchop._core.definition import Definition
from torchop._define.forms import schemas
from torchop._define.forms.checks import check_fits, metadata
from torchop._define.forms.identity import identified
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema


def define_member(
    functional: Definition,
    name: OpName,
    schema: Schema,
    kernel: Callable[..., Any],
    guard: Guard,
    lib: torch.library.Library | None,
    *,
    devices: tuple[str | None, ...] = (None,),
    tags: tuple[Tag, ...] = (),
) -> Definition:
    """Defines one form of a functional operator, which looks like that.

    Args:
        functional: the operator that computes the same into fresh tensors.
        name: of the form.
        schema: of the form.
        kernel: returns what it wrote.
        guard: looks at the arguments of a call before any kernel.
        lib: the caller's library that it lives in.
        devices: the device types that the kernel is for.
        tags: beside those of every form of this kind.
    """
    all_tags = (Tag.pt2_compliant_tag, *tags, *schemas.conventional_tags(schema.form))
    declaration = Declaration(
        name,
        schema,
        identified(kernel, functional.handle, name, schema),
        functional.declaration.site,
        devices,
        tuple(dict.fromkeys(all_tags)),
        fake=_fake(functional, name, schema),
        guard=guard,
    )
    through_functional = writing_result(functional, name, schema)
    with all_or_nothing(name):
        form = define(declaration, lib)
        form.rule(TorchDispatchRule).register(
            FunctionalTensorMode, _functionalization(through_functional)
        )
        if schema.form is Form.INPLACE:
            form.rule(AutogradRule).decomposition = _differentiable(functional, name, schema)
        original = weakref.ref(functional)
        reason = f"{name} is a form of {functional}, which is gone."

        def reason_gone() -> str:
            ended = original()  # without it, the form would go on with the old kernel
            return f"{reason} {(ended and ended.reason_gone) or ''}".rstrip()

        end_with(functional.library, form, reason_gone)
    return form


def writing_result(functional: Definition, name: OpName, schema: Schema) -> Callable[..., Any]:
    """A kernel of a form: calls the functional operator, and copies what it returns."""

    def compute_and_copy(*args: Any, **kwargs: Any) -> Any:
        outputs = returned_arguments(schema, args, kwargs)
        results = functional.overload(*args, **_inputs(schema, kwargs))
        _check_results(name, schema, results, outputs)
        for output, result in zip(outputs, _tuple(results), strict=True):
            output.copy_(result)
        return returned_result(schema, args, kwargs)

    return compute_and_copy


def _fake(functional: Definition, name: OpName, schema: Schema) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        outputs = returned_arguments(schema, args, kwargs)
        results = functional.overload(*args, **_inputs(schema, kwargs))
        _check_results(name, schema, results, outputs)
        return returned_result(schema, args, kwargs)

    return fake


def _functionalization(through_functional: Callable[..., Any]) -> Callable[..., Any]:
    def functionalize(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with mode:
            return through_functional(*args, **(kwargs or {}))

    return functionalize


def _differentiable(functional: Definition, name: OpName, schema: Schema) -> Callable[..., Any]:
    def differentiate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # What the formula saves must outlive the write into `x`, so it is given a copy.
        result = functional.overload(x.clone(), *args, **kwargs)
        _check_results(name, schema, result, (x,))
        return x.copy_(result)

    return differentiate


def _inputs(schema: Schema, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that the functional operator takes."""
    return {name: value for name, value in kwargs.items() if name not in schema.mutated}


def _check_results(name: OpName, schema: Schema, results: Any, outputs: tuple[Tensor, ...]) -> None:
    for argument, output, result in zip(schema.mutated, outputs, _tuple(results), strict=True):
        check_fits(name, schema, argument, metadata(result), output)


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
