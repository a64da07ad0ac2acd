"""The arguments of a call beside those of the schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._contract import tensors_in
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

    def find() -> Iterator[tuple[str, Tensor]]:
        for argument, value in zip(schema.positional, args, strict=False):
            if argument.is_mutated:
                yield from ((argument.name, tensor) for tensor in tensors_in((value,)))
        for argument in schema.keyword_only:
            if argument.is_mutated and argument.name in kwargs:
                value = kwargs[argument.name]
                yield from ((argument.name, tensor) for tensor in tensors_in((value,)))

    return list(find())
