"""The in-place and the out= form of an operator that exists: they call it, and copy its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.library

from torchop._core.define import check_home
from torchop._core.definition import Definition, Guard
from torchop._define.forms import schemas
from torchop._define.forms.checks import check_outputs
from torchop._define.forms.identity import identified
from torchop._define.forms.member import define_member, writing_result
from torchop._errors import SchemaError
from torchop._schema import naming
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

Handle = Any


def derive_inplace(
    functional: Handle, name: str | None, lib: torch.library.Library | None
) -> Handle:
    """See `CustomOp.derive_inplace`."""
    definition = functional._definition
    _check_flat(definition)
    check_derivable(definition.name, definition.schema, Form.INPLACE)
    op_name = _name(name, schemas.inplace_name(definition.name))
    schema = schemas.inplace_schema(op_name, definition.schema)
    return _derive(functional, op_name, schema, lib)


def derive_out(
    functional: Handle,
    name: str | None,
    outputs: Sequence[str] | None,
    lib: torch.library.Library | None,
) -> Handle:
    """See `CustomOp.derive_out`."""
    definition = functional._definition
    _check_flat(definition)
    check_derivable(definition.name, definition.schema, Form.OUT)
    names = output_names(definition.schema, outputs)
    op_name = _name(name, schemas.out_name(definition.name))
    schema = schemas.out_schema(op_name, definition.schema, names)
    return _derive(functional, op_name, schema, lib)


def _check_flat(definition: Definition) -> None:
    if definition.structure is not None:
        raise SchemaError(
            f"{definition}: other forms are derived from operators whose parameters a schema can "
            "express, and this one takes or returns structures. Define the form by itself, with "
            f"torch.Tag.inplace or torch.Tag.out. Got {definition.schema}."
        )


def check_derivable(name: object, schema: Schema, form: Form) -> None:
    """Refuses an operator that has no such form.

    Raises:
        SchemaError: naming what it would need.
    """
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


def output_names(functional: Schema, given: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the outputs: `out`, or `out0`, `out1` and so on.

    Raises:
        SchemaError: the names given are not one new name for each result.
    """
    count = len(functional.returns)
    if given is None:
        names = ("out",) if count == 1 else tuple(f"out{index}" for index in range(count))
    else:
        names = (given,) if isinstance(given, str) else tuple(given)
    taken = {argument.name for argument in functional.arguments}
    if len(names) != count or len(set(names)) != count or taken & set(names):
        raise SchemaError(
            f"outputs={names!r}: expected {count} names that are not those of arguments, one for "
            f"each result of {functional}."
        )
    return names


def _name(given: str | None, conventional: OpName) -> OpName:
    return naming.check_new(str(conventional) if given is None else given)


def _derive(
    functional: Handle,
    name: OpName,
    schema: Schema,
    lib: torch.library.Library | None,
) -> Handle:
    home = functional._definition.home if lib is None else lib
    check_home(name, home)
    kernel = writing_result(functional, name, schema)
    return define_member(
        functional,
        name,
        schema,
        identified(kernel, functional, name, schema),
        guard=_guard(name, schema),
        devices=[None],  # the functional operator has the kernels, those of the future included
        tags=schemas.conventional_tags(schema.form),
        lib=home,
    )


def _guard(name: OpName, schema: Schema) -> Guard:
    def guard(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # The result is complete before anything is written, so an output may be an input.
        check_outputs(name, schema, args, kwargs, may_be_an_input=True)

    return guard
