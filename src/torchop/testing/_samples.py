"""Samples as a caller could pass them: an operator refuses to write some that require grad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._schema.forms import Form
from torchop._schema.schema import Schema

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def without_refused_gradients(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sample:
    """The sample, detached where a call that records gradients would be refused.

    A tensor that requires grad is written by operators in the in-place form only; one with `out=`
    takes none at all.
    """
    names = {a.name for a in schema.arguments} if schema.form is Form.OUT else set(schema.mutated)
    return _mapped(schema, args, kwargs, names, Tensor.detach)


def inside_a_graph(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
    """The sample of an in-place operator, with copies of leaves, which it must not write."""
    return _mapped(schema, args, kwargs, set(schema.mutated), Tensor.clone)


def _mapped(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], names: set[str], change: Any
) -> Sample:
    def changed(name: str, value: Any) -> Any:
        if name not in names:
            return value
        if isinstance(value, (list, tuple)):
            return [changed(name, item) for item in value]
        return change(value) if isinstance(value, Tensor) and value.requires_grad else value

    positional = [a.name for a in schema.positional][: len(args)]
    return (
        tuple(changed(name, value) for name, value in zip(positional, args, strict=False)),
        {name: changed(name, value) for name, value in kwargs.items()},
    )
