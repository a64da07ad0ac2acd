"""Finds undeclared mutations, bit for bit, and results that share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import classes
from torchop._compat.classes import OpOverload
from torchop._core.call import named_inputs, named_outputs
from torchop._core.snapshot import Snapshot, overlap
from torchop._errors import AliasError
from torchop._schema.schema import Schema


def check_inputs(
    schema: Schema, overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Runs an operator on copies of its inputs; refuses writes that its schema does not declare."""
    args, kwargs = _copies((tuple(args), dict(kwargs)))
    # A snapshot instead of `checking`, which sees only kernels that torchop registered.
    snapshot = Snapshot(schema, args, kwargs)
    overload(*args, **kwargs)
    snapshot.check(overload._name)


def check_memory(
    schema: Schema, overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Runs an operator twice; refuses outputs in the memory of inputs or of the other call."""
    if not schema.is_functional:
        return
    args, kwargs = _copies((tuple(args), dict(kwargs)))
    result = overload(*args, **kwargs)
    # NumPy and DLPack share memory by a second storage that wraps it.
    inputs = list(named_inputs(schema, args, kwargs))
    for output, tensor in named_outputs(result):
        for argument, where, other in inputs:
            if _overlap(tensor, other):
                raise AliasError(
                    f"{output} of {schema} is in the memory of {where}: Argument {argument} is "
                    "not defined to alias output but was aliasing, through NumPy or DLPack. Return "
                    "a copy."
                )
    # A kernel that returns the same tensor each time gives one caller the result of another.
    later = dict(named_outputs(overload(*args, **kwargs)))
    for where, tensor in named_outputs(result):
        if where in later and _overlap(tensor, later[where]):
            raise AliasError(
                f"{where} of {schema} is the same memory in two calls: the kernel returned a "
                "tensor that it keeps. Return a fresh one, such as a clone."
            )


def _copies(tree: Any) -> Any:
    """Copies tensors with their whole storage; tensors that share a storage share its copy."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not _has_strides(plain):
            return plain.clone().requires_grad_(tensor.requires_grad)
        storage = plain.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        shared = torch.empty(0, dtype=plain.dtype, device=plain.device).set_(
            storages[storage._cdata], plain.storage_offset(), plain.shape, plain.stride()
        )
        return shared.requires_grad_(tensor.requires_grad)

    return classes.tree_map_only(Tensor, copy, tree)


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.layout is not torch.strided:
        return left.shape == right.shape
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return bool(torch.equal(*as_bytes))


def _has_strides(tensor: Tensor) -> bool:
    plain = not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
    return plain and tensor.layout is torch.strided


def _overlap(left: Tensor, right: Tensor) -> bool:
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return False
    return overlap(left.untyped_storage(), right.untyped_storage())
