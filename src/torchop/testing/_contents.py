"""Undeclared mutation and shared memory, found exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torchop import _compat
from torchop._contract import named_inputs, named_outputs
from torchop._errors import AliasError
from torchop._schema.schema import Schema


def check_contents(
    schema: Schema, overload: _compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Runs an operator on copies of its inputs, and compares them before and after.

    Raises:
        RuntimeError: an argument changed that the schema does not mark as mutated.
        AliasError: an output lies in the memory of an input.
    """
    args, kwargs = tree_map_only(Tensor, _copy, (tuple(args), dict(kwargs)))
    inputs = list(named_inputs(schema, args, kwargs))
    before = [tensor.detach().clone() for _, _, tensor in inputs]
    result = overload(*args, **kwargs)
    for (argument, where, tensor), earlier in zip(inputs, before, strict=True):
        if argument in schema.mutated:
            continue
        if not same_bits(tensor.detach(), earlier):
            raise RuntimeError(
                f"{where} of {schema}: Argument {argument} is not defined as mutable but was "
                f"mutated. Name it in mutates_args, or write into a copy."
            )
    if schema.is_functional:
        _check_memory(schema, inputs, result)
        _check_fresh(schema, result, overload(*args, **kwargs))


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad)


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.layout is not torch.strided:
        return left.shape == right.shape
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return bool(torch.equal(*as_bytes))


def _check_memory(schema: Schema, inputs: Sequence[tuple[str, str, Tensor]], result: Any) -> None:
    # Two storages may wrap the same memory, which is how NumPy and DLPack share it.
    for output, tensor in named_outputs(result):
        for argument, where, other in inputs:
            if _overlap(tensor, other):
                raise AliasError(
                    f"{output} of {schema} lies in the memory of {where}: Argument {argument} is "
                    "not defined to alias output but was aliasing, through NumPy or DLPack. Return "
                    "a copy."
                )


def _check_fresh(schema: Schema, first: Any, second: Any) -> None:
    # A kernel that keeps a tensor and returns it each time hands one caller another's result.
    later = dict(named_outputs(second))
    for where, tensor in named_outputs(first):
        if where in later and _overlap(tensor, later[where]):
            raise AliasError(
                f"{where} of {schema} is the same memory in two calls: the kernel returned a "
                "tensor that it keeps. Return a fresh one, such as a clone."
            )


def _overlap(left: Tensor, right: Tensor) -> bool:
    if left.device != right.device or left.device.type != "cpu":
        return False
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return False
    first, second = left.untyped_storage(), right.untyped_storage()
    if not first.nbytes() or not second.nbytes():
        return False
    return (
        first.data_ptr() < second.data_ptr() + second.nbytes()
        and second.data_ptr() < first.data_ptr() + first.nbytes()
    )
