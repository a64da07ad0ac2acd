"""Lists of tensors spread over the operands of an autograd.Function, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchop._definition import Definition

# The number of entries of each argument or output: None for one that is no list of tensors. A whole
# layout of None means that there is no list at all, so that flat and structured are the same.
Layout = tuple["int | None", ...]


def input_layout(definition: Definition, args: Sequence[Any]) -> Layout | None:
    """The layout of all positional arguments of an operator."""
    schema = definition.schema
    if not schema.has_tensor_lists:
        return None
    return tuple(
        len(value) if argument.is_tensor_list and value is not None else None
        for argument, value in zip(schema.positional, args, strict=False)
    )


def output_layout(values: Sequence[Any]) -> Layout | None:
    """The layout of results."""
    layout = tuple(len(value) if isinstance(value, list) else None for value in values)
    return layout if any(length is not None for length in layout) else None


def flatten(values: Sequence[Any], layout: Layout | None) -> Sequence[Any]:
    """Spreads out what the layout says is a list."""
    if layout is None:
        return values
    flat: list[Any] = []
    for value, length in zip(values, layout, strict=True):
        if length is None:
            flat.append(value)
        else:
            flat.extend(value)
    return flat


def unflatten(flat: Sequence[Any], layout: Layout | None) -> Sequence[Any]:
    """Undoes `flatten`."""
    if layout is None:
        return flat
    values: list[Any] = []
    rest = iter(flat)
    for length in layout:
        values.append(next(rest) if length is None else [next(rest) for _ in range(length)])
    return tuple(values)
