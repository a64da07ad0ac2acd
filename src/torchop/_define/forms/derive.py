"""The in-place and the out= form of an existing operator: they call it, and copy its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.library

from torchop._core.definition import Definition
from torchop._core.library import check_callers_library
from torchop._define.forms import schemas
from torchop._define.forms.checks import check_outputs
from torchop._define.forms.member import define_member, writing_result
from torchop._errors import SchemaError, short_repr
from torchop._schema import naming
from torchop._schema.forms import Form
from torchop._schema.schema import Schema


def derive_form(
    functional: Definition,
    form: Form,
    name: str | None,
    lib: torch.library.Library | None,
    outputs: Sequence[str] | None = None,
) -> Definition:
    """See `CustomOp.derive_inplace` and `CustomOp.derive_out`."""
    if functional.structure is not None:
        raise SchemaError(
            f"{functional}: other forms are derived from operators whose parameters a schema can "
            "express, and this one takes or returns structures. Define the form by itself, with "
            f"torch.Tag.inplace or torch.Tag.out. Got {functional.schema}."
        )
    check_derivable(functional.name, functional.schema, form)
    op_name = naming.check_new(
        str(schemas.form_name(functional.name, form)) if name is None else name
    )
    if form is Form.INPLACE:
        schema = schemas.inplace_schema(op_name, functional.schema)
    else:
        names = output_names(functional.schema, outputs)
        schema = schemas.out_schema(op_name, functional.schema, names)
    lib = functional.callers_library if lib is None else lib
    check_callers_library(op_name, lib)
    # For every device: the functional operator has the kernels, those of the future included.
    kernel = writing_result(functional, op_name, schema)

    def guard(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # The result is complete before anything is written, so an output may be an input.
        check_outputs(op_name, schema, args, kwargs, may_be_an_input=True)

    return define_member(functional, op_name, schema, kernel, guard, lib)


def check_derivable(name: object, schema: Schema, form: Form) -> None:
    """Refuses an operator that has no such form."""
    if not schema.is_functional or set(schema.returns) != {"Tensor"}:
        problem = "only an operator that mutates nothing and returns fresh tensors has other forms"
    elif form is Form.OUT:
        return
    elif len(schema.returns) > 1:
        problem = "an in-place operator has one result, in place of its first argument"
    elif not schema.positional or schema.positional[0].kind != "Tensor":
        problem = "an in-place operator takes a Tensor first, which it overwrites"
    elif schema.positional[0].has_default:
        problem = "the first argument of an in-place operator has no default"
    else:
        return
    raise SchemaError(f"{name}: {problem}. Got {schema}.")


def output_names(functional: Schema, outputs: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the outputs: `out`, or `out0`, `out1` and so on, if a user names none."""
    count = len(functional.returns)
    if outputs is None:
        names = ("out",) if count == 1 else tuple(f"out{index}" for index in range(count))
    else:
        names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    arguments = {argument.name for argument in functional.arguments}
    if len(names) != count or len(set(names)) != count or arguments & set(names):
        raise SchemaError(
            f"outputs={short_repr(names)}: expected {count} names, one for each result of "
            f"{functional}, and none of them the name of an argument."
        )
    return names
