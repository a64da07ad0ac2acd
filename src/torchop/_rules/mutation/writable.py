"""Check mutated tensors, and raise the same errors as PyTorch's in-place operators.

The checks run before the kernel, so a rejected call changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from torchop._compat import aliasing, dispatch, tracing
from torchop._core.contract import share_memory, storage_of
from torchop._errors import MutationError

# A tensor, and its description for error messages, such as "argument 'x'" or "input 'xs[2]'"
Placed = tuple[str, Tensor]


def check_history(operator: object, written: Sequence[Placed]) -> None:
    for where, tensor in written:
        problem = _history_problem(tensor)
        if problem is not None:
            raise _error(operator, where, problem)


def check_no_grad(operator: object, written: Sequence[Placed]) -> None:
    """Raise if a mutated tensor requires grad, because autograd cannot record the write."""
    check_history(operator, [(where, t) for where, t in written if t.requires_grad])
    for where, tensor in written:
        if tensor.requires_grad:
            raise _error(
                operator,
                where,
                "the operator would write into this tensor, but the tensor requires grad and "
                "would lose the gradient. Autograd only supports in-place forms "
                "(torch.Tag.inplace), because they return the tensor that they write. Use such an "
                "operator or a functional one. If no gradient should flow, pass x.detach(), or "
                "call it under torch.no_grad().",
            )


def check_saved(operator: object, written: Sequence[Placed], read: Sequence[Placed]) -> None:
    """Raise if a mutated tensor overlaps an input that `setup_context` may save.

    `setup_context` runs after the kernel, so it would save the overwritten value. PyTorch would not
    notice, because it only detects writes that happen after a tensor was saved.
    """
    for where, tensor in written:
        for place, other in read:
            if _may_overlap(tensor, other):
                raise _error(
                    operator,
                    f"{where} and {place}",
                    "they share memory, and the formula would save the new value where it needs "
                    "the old one. Please clone() the input before performing the operation.",
                )


def check_version(operator: object, written: Sequence[Placed]) -> None:
    """Raise if a tensor is an inference tensor, which has no version counter."""
    if torch.is_inference_mode_enabled():
        return
    # Bypass Tensor subclasses and modes, as PyTorch's own check in C++ does.
    with dispatch.plain_tensors():
        unversioned = [where for where, tensor in written if tensor.is_inference()]
    for where in unversioned:
        raise _error(
            operator,
            where,
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can "
            "make a clone to get a normal tensor before doing inplace update.",
        )


def check_memory(operator: object, written: Sequence[Placed]) -> None:
    for where, tensor in written:
        if aliasing.overlaps_itself(tensor):
            raise _error(
                operator,
                where,
                "unsupported operation: more than one element of the written-to tensor refers to "
                "a single memory location. Please clone() the tensor before performing the "
                "operation.",
            )


def check_overlap(
    operator: object,
    written: Sequence[Placed],
    read: Sequence[Placed],
    *,
    may_be_the_same: bool = True,
) -> None:
    """Raise if mutated tensors overlap each other or an input.

    If `may_be_the_same` is true, an input may be identical to a mutated tensor, as in `torch.sin(x,
    out=x)`.
    """
    for where, tensor in written:
        for place, other in read:
            same = _is_same(tensor, other)
            if not may_be_the_same if same else _share_memory(tensor, other):
                raise _error(operator, f"{where} and {place}", _OVERLAP)
    for (where, tensor), (place, other) in combinations(written, 2):
        if _is_same(tensor, other) or _share_memory(tensor, other):
            raise _error(operator, f"{where} and {place}", _OVERLAP)


_OVERLAP = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
    "single memory location. Please clone() the tensor before performing the operation."
)


def _error(operator: object, where: str, problem: str) -> MutationError:
    return MutationError(f"{operator}: {where}: {problem}")


_UNRECORDED = "Call it under torch.no_grad(), or pass .detach() or .clone() of the tensor."


def _history_problem(tensor: Tensor) -> str | None:
    base = tensor._base
    if base is not None:
        problem = aliasing.view_problem(tensor)
        if problem is not None:
            return problem
        if tensor.requires_grad and base.is_leaf:
            return (
                "a view of a leaf Variable that requires grad is being used in an in-place "
                f"operation. {_UNRECORDED}"
            )
    if tensor.requires_grad and tensor.is_leaf:
        return (
            "a leaf Variable that requires grad is being used in an in-place operation. "
            f"{_UNRECORDED}"
        )
    return None


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if not (aliasing.is_dense(one) and aliasing.is_dense(other)):
        return False
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def _may_overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether the address ranges of two tensors overlap, as for two columns of a matrix."""
    if not (one.layout is other.layout is torch.strided):
        return one is other
    if tracing.is_traced(one) and tracing.is_traced(other):
        return tracing.may_overlap(one, other)
    if storage_of(one) == storage_of(other):  # a subclass may have no addresses
        start = one.storage_offset() * one.itemsize - other.storage_offset() * other.itemsize
    elif share_memory(one, other):
        start = one.data_ptr() - other.data_ptr()
    else:
        return False
    return start < _span(other) and -start < _span(one)


def _span(tensor: Tensor) -> int:
    """Return the number of bytes from the start of the first element to the end of the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return one.numel() > 0
    return (
        one.layout is other.layout is torch.strided
        and one.numel() > 0
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
