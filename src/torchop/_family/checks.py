"""What is asked of a tensor before an operator writes its result into it.

The words are those of PyTorch's own operators, where these refuse the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._contract import named_inputs, tensors_in
from torchop._errors import ArgumentError, OutputError
from torchop._family.overlap import Overlap, overlap, overlaps_itself
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
    name: object, schema: Schema, argument: str, expected: Metadata, given: Tensor
) -> None:
    """Refuses to write a result into a tensor that does not look like it.

    Raises:
        OutputError: naming the operator, the argument and both.
    """
    found = metadata(given)
    if found == expected:
        return
    inplace = schema.form is Form.INPLACE
    for field, wanted, got in zip(Metadata._fields, expected, found, strict=True):
        if wanted == got:
            continue
        fix = (
            "An in-place operator cannot change that; use the functional operator."
            if inplace
            else "An operator that writes into a buffer of yours does not resize or convert it; "
            f"pass torch.empty({expected.shape}, dtype={expected.dtype}, "
            f"device={str(expected.device)!r})."
        )
        raise OutputError(
            f"{name}: Expected {'in-place' if inplace else 'out'} tensor {argument!r} to have "
            f"{field} {wanted}, but got {got} instead. {fix}"
        )


def check_writable(
    name: object,
    schema: Schema,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    may_be_an_input: bool,
) -> None:
    """Refuses a call that would write where it must not.

    Args:
        name: the operator.
        schema: its schema, of one of the two forms.
        args: the arguments of the call.
        kwargs: the keyword arguments.
        may_be_an_input: whether an output may be one of the inputs, as a whole.

    Raises:
        ArgumentError: an output is None.
        OutputError: an output is an inference tensor outside inference mode, overlaps itself,
            another output, or an input.
    """
    tensors = [(n, where, tensor) for n, where, tensor in named_inputs(schema, args, kwargs)]
    outputs = {n: tensor for n, _, tensor in tensors if n in schema.mutated}
    for output in schema.mutated:
        if output not in outputs:
            raise ArgumentError(
                f"{name}: argument {output!r} is None, but the schema says Tensor: {schema}."
            )
    for output, tensor in outputs.items():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise OutputError(
                f"{name}: argument {output!r}: Inplace update to inference tensor outside "
                "InferenceMode is not allowed. You can make a clone to get a normal tensor before "
                "doing inplace update."
            )
        if overlaps_itself(tensor):
            raise OutputError(
                f"{name}: argument {output!r}: unsupported operation: more than one element of the "
                "written-to tensor refers to a single memory location. Please clone() the tensor "
                "before performing the operation."
            )
    _check_overlap(name, outputs, tensors, may_be_an_input=may_be_an_input)


def _check_overlap(
    name: object,
    outputs: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, str, Tensor]],
    *,
    may_be_an_input: bool,
) -> None:
    for output, written in outputs.items():
        for argument, where, tensor in tensors:
            if argument == output:
                continue
            shared = overlap(written, tensor)
            allowed = may_be_an_input and argument not in outputs
            if shared is Overlap.SOMETHING or (shared is Overlap.EVERYTHING and not allowed):
                raise OutputError(
                    f"{name}: argument {output!r} and {where}: unsupported operation: some "
                    "elements of the input tensor and the written-to tensor refer to a single "
                    "memory location. Please clone() the tensor before performing the operation."
                )
