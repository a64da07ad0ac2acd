"""Checks of a tensor before an operator writes its result into it.

If PyTorch's own operators refuse the same, the messages are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._core.call import named_inputs, returned_arguments, tensors_in
from torchop._errors import ArgumentError, MutationError
from torchop._rules.mutation.writable import check_overlap
from torchop._schema.forms import Form
from torchop._schema.schema import Schema


class Metadata(NamedTuple):
    """What the result of a call looks like."""

    shape: list[Any]
    dtype: torch.dtype
    layout: torch.layout
    device: torch.device


def metadata(tensor: Tensor) -> Metadata:
    return Metadata(list(tensor.shape), tensor.dtype, tensor.layout, tensor.device)


def described_results(
    allocate: Callable[..., tuple[Tensor, ...]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Metadata]:
    """What the results of a call would look like, without any memory for them."""
    twins = allocate(*map(_twin, args), **{name: _twin(value) for name, value in kwargs.items()})
    first = next(tensors_in((*args, *kwargs.values())), None)
    return [
        # The twins of all inputs are on the meta device, and so is what is made like them.
        metadata(twin)._replace(device=twin.device if first is None else first.device)
        if twin.is_meta
        else metadata(twin)
        for twin in twins
    ]


def _twin(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value.to("meta")
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_twin(item) for item in value] if isinstance(value, list) else value


def check_fits(
    name: object, schema: Schema, argument: str, expected: Metadata, tensor: Tensor
) -> None:
    """Refuses to write a result into a tensor that does not look like it."""
    actual = metadata(tensor)
    if actual == expected:
        return
    inplace = schema.form is Form.INPLACE
    for field, required, got in zip(Metadata._fields, expected, actual, strict=True):
        if required == got:
            continue
        fix = (
            "An in-place operator cannot change that; use the functional operator."
            if inplace
            else "An operator that writes into a buffer of yours does not resize or convert it; "
            f"pass torch.empty({expected.shape}, dtype={expected.dtype}, "
            f"device={str(expected.device)!r})."
        )
        raise MutationError(
            f"{name}: Expected {'in-place' if inplace else 'out'} tensor {argument!r} to have "
            f"{field} {required}, but got {got} instead. {fix}"
        )


def check_outputs(
    name: object,
    schema: Schema,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    may_be_an_input: bool,
) -> None:
    """Refuses outputs that are missing, or that the kernel still reads when it writes them.

    The mutation rule has already refused tensors that no operator may write into. If an output may
    be an input, it must be the whole tensor.
    """
    outputs = returned_arguments(schema, args, kwargs)
    written = [(f"argument {n!r}", t) for n, t in zip(schema.mutated, outputs, strict=True)]
    for where, tensor in written:
        if tensor is None:
            raise ArgumentError(f"{name}: {where} is None, but the schema says Tensor: {schema}.")
    if not may_be_an_input:
        tensors = named_inputs(schema, args, kwargs)
        read = [(where, tensor) for n, where, tensor in tensors if n not in schema.mutated]
        check_overlap(name, written, read, may_be_the_same=False)
