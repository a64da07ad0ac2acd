"""The arguments of a call beside those of the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._contract import named_tensors
from torchop._schema.schema import Argument, Schema


def map_arguments(
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Argument, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, each replaced by `change(argument, value)`."""
    positional = tuple(change(a, value) for a, value in zip(schema.positional, args, strict=False))
    keywords = {a.name: change(a, kwargs[a.name]) for a in schema.keyword_only if a.name in kwargs}
    return positional, keywords


def mutated_tensors(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """The tensors that a call writes into, those inside lists included, each with its argument."""

    # In the order of the schema, however the call spelled them.
    values = [(a.name, v) for a, v in zip(schema.positional, args, strict=False) if a.is_mutated]
    values += [
        (a.name, kwargs[a.name]) for a in schema.keyword_only if a.is_mutated and a.name in kwargs
    ]
    return [(name, tensor) for name, _, tensor in named_tensors(values)]
