"""Derive the in-place and out= forms of a functional operator.

Each form calls the functional operator, and copies the result into the first argument or into the
outputs. Compilers simply trace these two steps, so they need no special support for these forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.library
from torch import Tensor

from torchop._compat.classes import Tag
from torchop._core.call import returned_arguments, returned_result
from torchop._core.declaration import Declaration, Guard
from torchop._core.definition import Definition
from torchop._define.forms import schemas
from torchop._define.forms.kernels import check_fits, check_outputs, metadata
from torchop._define.forms.schemas import identified
from torchop._errors import SchemaError, short_repr
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.helper_operators import define_derived
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema


def derive_form(
    functional: Definition,
    form: Form,
    name: str | None,
    lib: torch.library.Library | None,
    outputs: Sequence[str] | None = None,
) -> Definition:
    if functional.structure is not None:
        raise SchemaError(
            f"{functional}: forms cannot be derived from an operator with structured arguments or "
            "results. Define the form as a separate operator, with torch.Tag.inplace or "
            f"torch.Tag.out. Got {functional.schema}."
        )
    check_derivable(functional.name, functional.schema, form)
    lib = functional.callers_library if lib is None else lib
    default = schemas.form_name(functional.name, form)
    op_name = OpName.parse_new(str(default) if name is None else name)
    if form is Form.INPLACE:
        schema = schemas.inplace_schema(op_name, functional.schema)
    else:
        names = output_names(functional.schema, outputs)
        schema = schemas.out_schema(op_name, functional.schema, names)
    # A single kernel works for all devices, because it calls the functional operator, which in turn
    # dispatches on the device.
    kernel = writing_result(functional, op_name, schema)

    def guard(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # An output may also be an input, because all results are computed before the first one is
        # copied into an output.
        check_outputs(op_name, schema, args, kwargs, may_be_an_input=True)

    return define_member(functional, op_name, schema, kernel, guard, lib)


def check_derivable(name: object, schema: Schema, form: Form) -> None:
    if not schema.is_functional or set(schema.returns) != {"Tensor"}:
        problem = (
            "forms need a functional operator, which mutates nothing and returns fresh tensors"
        )
    elif form is Form.OUT:
        return
    elif len(schema.returns) > 1:
        problem = "an in-place form needs an operator with one result"
    elif not schema.positional or schema.positional[0].kind != "Tensor":
        problem = "an in-place form needs an operator whose first argument is a Tensor"
    elif schema.positional[0].has_default:
        problem = "the first argument of an in-place operator must not have a default"
    else:
        return
    raise SchemaError(f"{name}: {problem}. Got {schema}.")


def output_names(functional: Schema, outputs: Sequence[str] | None) -> tuple[str, ...]:
    """Validate the names of the outputs, which default to `out`, or to `out0`, `out1` and so on."""
    count = len(functional.returns)
    if outputs is None:
        names = ("out",) if count == 1 else tuple(f"out{index}" for index in range(count))
    else:
        names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    arguments = {argument.name for argument in functional.arguments}
    if len(names) != count or len(set(names)) != count or arguments & set(names):
        raise SchemaError(
            f"outputs={short_repr(names)}: expected {count} names, one for each result of "
            f"{functional}. They must differ from each other and from the names of arguments."
        )
    return names


def define_member(
    functional: Definition,
    name: OpName,
    schema: Schema,
    kernel: Callable[..., Any],
    guard: Guard | None,
    lib: torch.library.Library | None,
    *,
    devices: tuple[str | None, ...] = (None,),
    tags: tuple[Tag, ...] = (),
) -> Definition:
    """Define the in-place or out= form of a functional operator.

    `kernel` must return the mutated arguments, and `guard` checks the arguments of every call
    before the kernel runs. The new operator gets `tags` in addition to the tag of its form.
    """
    # Do not tag an out= form with `torch.Tag.out`. Inductor would replace the functional operator
    # with any overload that has this tag, and for most signatures, it would pass wrong arguments.
    # `_compat.planned_outputs` registers a correct replacement instead.
    conventional_tags = () if schema.form is Form.OUT else schema.form.tags
    all_tags = (Tag.pt2_compliant_tag, *tags, *conventional_tags)
    declaration = Declaration(
        name,
        schema,
        identified(kernel, functional.handle, name, schema),
        functional.declaration.site,
        devices,
        tuple(dict.fromkeys(all_tags)),
        fake=writing_result(functional, name, schema, copies=False),
        guard=guard,
        functionalize=_functionalization(writing_result(functional, name, schema)),
    )
    kind = "inplace" if schema.form is Form.INPLACE else "out"

    def register_rules(form: Definition) -> None:
        if schema.form is Form.INPLACE:
            form.rule(AutogradRule).decomposition = _differentiable(functional, name, schema)

    return define_derived(functional, declaration, kind, register_rules, lib=lib)


def writing_result(
    functional: Definition, name: OpName, schema: Schema, *, copies: bool = True
) -> Callable[..., Any]:
    """Return a kernel that computes results functionally and copies them into the outputs.

    With `copies=False`, return the fake kernel, which checks the outputs but skips the copy.
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
        # Pass a clone of `x`, because the backward formula may save the input, and the code below
        # overwrites `x`.
        result = functional.overload(x.clone(), *args, **kwargs)
        check_fits(name, schema, schema.mutated[0], metadata(result), x)
        return x.copy_(result)

    return differentiate
