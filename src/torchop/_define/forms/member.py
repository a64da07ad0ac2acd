"""The in-place or out= form of an operator: its definition, and what compilers see.

Compilers see the same as for PyTorch's own forms: the functional operator, and a copy into the
tensor that is written. So a form cannot be compiled wrongly, in any release. The formula and the
fake kernel of the functional operator serve all forms.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.library
from torch import Tensor

from torchop._compat.classes import FunctionalTensorMode, Tag
from torchop._core.call import returned_arguments, returned_result
from torchop._core.declaration import Declaration, Guard
from torchop._core.define import all_or_nothing, define, end_with
from torchop._core.definition import Definition
from torchop._core.user_rule import follow
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
    """Defines one form of a functional operator, with a kernel that returns what it wrote.

    The tags are added to those of every form of this kind.
    """
    all_tags = (Tag.pt2_compliant_tag, *tags, *schemas.conventional_tags(schema.form))
    declaration = Declaration(
        name,
        schema,
        identified(kernel, functional.handle, name, schema),
        functional.declaration.site,
        devices,
        tuple(dict.fromkeys(all_tags)),
        fake=writing_result(functional, name, schema, copies=False),
        guard=guard,
    )
    through_functional = writing_result(functional, name, schema)

    def build() -> Definition:
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
        follow(functional, form, "inplace" if schema.form is Form.INPLACE else "out")
        return form

    return all_or_nothing(name, build)


def writing_result(
    functional: Definition, name: OpName, schema: Schema, *, copies: bool = True
) -> Callable[..., Any]:
    """A kernel of a form: calls the functional operator, and copies what it returns.

    Without the copies, it is the fake kernel.
    """

    def compute_and_copy(*args: Any, **kwargs: Any) -> Any:
        outputs = returned_arguments(schema, args, kwargs)
        inputs = {n: value for n, value in kwargs.items() if n not in schema.mutated}
        returned = functional.overload(*args, **inputs)
        results = returned if isinstance(returned, tuple) else (returned,)
        for argument, output, result in zip(schema.mutated, outputs, results, strict=True):
            check_fits(name, schema, argument, metadata(result), output)
        if copies:
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
        return returned_result(schema, args, kwargs)

    return compute_and_copy


def _functionalization(through_functional: Callable[..., Any]) -> Callable[..., Any]:
    def functionalize(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with mode:
            return through_functional(*args, **(kwargs or {}))

    return functionalize


def _differentiable(functional: Definition, name: OpName, schema: Schema) -> Callable[..., Any]:
    def differentiate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # What the formula saves must outlive the write into `x`, so it is given a copy.
        result = functional.overload(x.clone(), *args, **kwargs)
        check_fits(name, schema, schema.mutated[0], metadata(result), x)
        return x.copy_(result)

    return differentiate
