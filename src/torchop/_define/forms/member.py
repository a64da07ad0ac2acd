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

from torchop._compat import functionalization, libraries
from torchop._compat.classes import Tag
from torchop._core.contract import returned_arguments, returned_result
from torchop._core.define import define_operator
from torchop._core.definition import Guard
from torchop._core.lock import registration_lock
from torchop._define.forms.checks import check_fits, metadata
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.fake.rule import FakeRule
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

Handle = Any


def define_member(
    functional: Handle,
    name: OpName,
    schema: Schema,
    function: Callable[..., Any],
    *,
    guard: Guard,
    devices: list[str | None],
    tags: tuple[Tag, ...],
    lib: torch.library.Library | None,
) -> Handle:
    """Defines one form of a functional operator.

    Args:
        functional: the operator that computes the same into fresh tensors.
        name: of the form.
        schema: of the form.
        function: the kernel, which returns what it wrote.
        guard: looks at the arguments of a call before any kernel.
        devices: the device types that `function` is for.
        tags: the tags of the operator.
        lib: the library that it lives in.
    """
    place = functional._definition.place
    assert place is not None  # operators of ours have one
    through_functional = writing_result(functional, name, schema)
    with registration_lock:
        handle: Handle = define_operator(
            name,
            schema,
            function,
            devices=devices,
            tags=tuple(dict.fromkeys((Tag.pt2_compliant_tag, *tags))),
            lib=lib,
            place=place,
            schema_is_inferred=True,
            guard=guard,
        )
        definition = handle._definition
        definition.rule(FakeRule).replace(_fake(functional, name, schema))
        definition.rule(TorchDispatchRule).register(
            functionalization.functional_tensor_mode(), _functionalization(through_functional)
        )
        if schema.form is Form.INPLACE:
            definition.rule(AutogradRule).decomposition = _differentiable(functional, name, schema)
        _end_together(functional, handle)
    return handle


def _end_together(functional: Handle, member: Handle) -> None:
    """Ends a form with the operator that it is a form of: it would go on with the old kernel."""
    form, original = weakref.ref(member._definition), weakref.ref(functional._definition)
    names = f"{member.name} is a form of {functional.name}, which is gone."

    def close() -> None:
        if (definition := form()) is not None:
            ended = original()
            definition.close(f"{names} {(ended and ended.gone) or ''}".rstrip())

    libraries.on_close(functional._definition.library, close)


def writing_result(functional: Handle, name: OpName, schema: Schema) -> Callable[..., Any]:
    """A kernel of a form: calls the functional operator, and copies what it returns."""

    def compute_and_copy(*args: Any, **kwargs: Any) -> Any:
        outputs = returned_arguments(schema, args, kwargs)
        results = functional(*args, **_inputs(schema, kwargs))
        _check_results(name, schema, results, outputs)
        for output, result in zip(outputs, _tuple(results), strict=True):
            output.copy_(result)
        return returned_result(schema, args, kwargs)

    return compute_and_copy


def _fake(functional: Handle, name: OpName, schema: Schema) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        outputs = returned_arguments(schema, args, kwargs)
        _check_results(name, schema, functional(*args, **_inputs(schema, kwargs)), outputs)
        return returned_result(schema, args, kwargs)

    return fake


def _functionalization(through_functional: Callable[..., Any]) -> Callable[..., Any]:
    def functionalize(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with mode:
            return through_functional(*args, **(kwargs or {}))

    return functionalize


def _differentiable(functional: Handle, name: OpName, schema: Schema) -> Callable[..., Any]:
    def differentiate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # What the formula saves must outlive the write into `x`, so it is given a copy.
        result = functional(x.clone(), *args, **kwargs)
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
