"""Detect overlapping memory, and views that must not be modified in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

any_alias: Callable[..., bool] = torch._C._any_output_is_alias_to_input_or_output
has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage


def memory_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the start and end addresses of a tensor's storage. The end is exclusive.

    Return None for tensors that do not own addressable memory, such as subclasses and empty, sparse
    or meta tensors. Copy-on-write tensors also return None, because PyTorch copies their memory
    before the first write.
    """
    has_memory = (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and torch._C._has_storage(tensor)
        and not torch._is_functional_tensor(tensor)
        and not torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined]  # not in its stubs
    )
    if not has_memory:
        return None
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    return (start, start + size) if start and size else None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of `tensor` share memory with each other, as after `expand`."""
    # Check the layout first, because `_debug_has_internal_overlap` returns 1 ("yes") for every
    # layout without strides, such as the sparse layouts.
    return tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) == 1


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and torch.ops.aten.is_non_overlapping_and_dense(tensor)


# Copied from `handle_view_on_rebase` (torch/csrc/autograd/variable.cpp), which is not exposed to
# Python.
_CREATION_META = torch._C._autograd.CreationMeta
_MODE_PROBLEM = (
    "A view was created in {} mode and is being modified inplace {}. Given that this use case is "
    "ambiguous and error-prone, it is forbidden. You can clarify your code by moving both the view "
    "and the inplace either both inside the {} block (if you don't want the inplace to be tracked) "
    "or both outside (if you want the inplace to be tracked)."
)
_VIEW_PROBLEMS = {
    _CREATION_META.NO_GRAD_MODE: _MODE_PROBLEM.format(
        "no_grad", "with grad mode enabled", "no_grad"
    ),
    _CREATION_META.INFERENCE_MODE: _MODE_PROBLEM.format(
        "inference", "in normal mode", "inference_mode"
    ),
    _CREATION_META.MULTI_OUTPUT_NODE: (
        "Output {} of {} is a view and is being modified inplace. This view is the output of a "
        "function that returns multiple views. Such functions do not allow the output views to be "
        "modified inplace. You should replace the inplace operation by an out-of-place one."
    ),
    _CREATION_META.IN_CUSTOM_FUNCTION: (
        "Output {} of {} is a view and is being modified inplace. This view was created inside a "
        "custom Function (or because an input was returned as-is) "
        "and the autograd logic to handle view+inplace would override the custom backward "
        "associated with the custom Function, leading to incorrect gradients. This behavior is "
        "forbidden. You can fix this by cloning the output of the custom Function."
    ),
}


def view_problem(view: torch.Tensor) -> str | None:
    """Return PyTorch's error message for modifying `view` in place, or None if that is allowed."""
    problem = _VIEW_PROBLEMS.get(torch._C._autograd._get_creation_meta(view))
    if problem is None:
        return None
    function = view.grad_fn.name().partition("Backward")[0] if view.grad_fn else "a function"
    return problem.format(view.output_nr, function)
