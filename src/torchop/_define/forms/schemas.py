"""Derives the names and schemas of the other forms of a functional operator."""

from __future__ import annotations

from collections.abc import Sequence

from torchop._compat import schemas
from torchop._compat.classes import Tag
from torchop._schema.forms import Form, form_tags
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema
from torchop._schema.text import (
    arguments_of,
    lettered_alias,
    with_write,
    write,
    write_results,
    written_tensor,
)


def form_name(name: OpName, form: Form) -> OpName:
    """What PyTorch calls a form of `add`: `add_` or, as an overload, `add.out`.

    For `add.Scalar`, that is `add_.Scalar` or `add.Scalar_out`.
    """
    if form is Form.INPLACE:
        return name._replace(name=f"{name.name}_")
    return name._replace(overload=f"{name.overload}_out" if name.overload else "out")


def inplace_schema(name: OpName, functional: Schema) -> Schema:
    """The schema of the in-place form of an operator whose first argument is a Tensor."""
    first, *others = arguments_of(functional.written)
    alias = lettered_alias(0)
    arguments = [with_write(first, alias), *others]
    return _parsed(name, arguments, [written_tensor(alias)], Form.INPLACE)


def out_schema(name: OpName, functional: Schema, outputs: Sequence[str]) -> Schema:
    """The schema of the form with `out=` of an operator that returns as many tensors."""
    arguments = arguments_of(functional.written)
    if not functional.keyword_only:
        arguments.append("*")
    results = [written_tensor(lettered_alias(index)) for index in range(len(outputs))]
    written = [f"{kind} {output}" for kind, output in zip(results, outputs, strict=True)]
    return _parsed(name, [*arguments, *written], results, Form.OUT)


def conventional_tags(form: Form) -> tuple[Tag, ...]:
    """The tag of a form, if PyTorch handles it correctly.

    Not `torch.Tag.out`: Inductor looks for an overload with this tag, and calls it in place of the
    functional operator. On 2.13 that fails with dynamic shapes and with several results; it puts
    all tensors before all other arguments, takes lists apart, and passes defaults and keyword-only
    arguments twice.
    """
    return () if form is Form.OUT else form_tags(form)


def _parsed(name: OpName, arguments: Sequence[str], results: Sequence[str], form: Form) -> Schema:
    text = write(arguments, write_results(results))
    return Schema(schemas.parse(f"{name}{text}"), f"{name.local}{text}", form)
