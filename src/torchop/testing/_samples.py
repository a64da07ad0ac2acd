"""Convert the sample calls passed to `opcheck` and `check` to the arguments of a schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import fake_tensors
from torchop.extend import Form, Operator, Schema, named_inputs
from torchop.testing.probes import mapped, with_tensors

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def sample_of(
    operator: Operator, caller: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Sample:
    """Convert a sample call to arguments that match the schema of the operator."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"{caller}(op, args, ...): args must be a tuple of the positional arguments, got "
            f"{type(args).__name__}. For one argument, write (x,)."
        )
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(
            f"{caller}(op, args, kwargs, ...): kwargs must be a dict of the keyword arguments, got "
            f"{type(kwargs).__name__}. All others go into the tuple args."
        )
    positional, keywords = operator.flat_arguments(args, kwargs or {})
    for _, where, tensor in named_inputs(operator.schema, positional, keywords):
        if fake_tensors.is_fake(tensor):
            raise ValueError(
                f"{caller}(op, ...): {where} has no data (it is fake, or on the meta device), but "
                f"{caller} runs the kernel. Pass real tensors."
            )
    return positional, keywords


def refuse_lists(schema: Schema, values: Mapping[str, Any]) -> None:
    """Raise TypeError if a tensor argument is a list.

    The user has probably passed a list of samples instead of a single sample.
    """
    for argument in schema.arguments:
        if argument.kind == "Tensor" and isinstance(values.get(argument.name), (tuple, list)):
            raise TypeError(f"{argument.name!r} is a list or tuple, not a tensor")


def with_fake_tensors(sample: Sample) -> tuple[Any, Sample]:
    """Convert the tensors of a sample to fake tensors. Return the fake mode and the new sample."""
    mode = fake_tensors.new_fake_mode()
    return mode, mapped(sample, mode.from_tensor)


def without_refused_gradients(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sample:
    """Detach the tensors that must not require grad in a call of this operator.

    Only in-place operators may write to tensors that require grad. PyTorch supports no gradients at
    all for operators with an `out=` argument, so none of their arguments may require grad.
    """
    names = {a.name for a in schema.arguments} if schema.form is Form.OUT else set(schema.mutated)
    return _changed(schema, args, kwargs, names, Tensor.detach)


def inside_a_graph(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
    """Clone the mutated arguments that require grad, so that they are no longer leaves.

    PyTorch raises an error if an in-place operator writes to a leaf tensor that requires grad.
    """
    return _changed(schema, args, kwargs, set(schema.mutated), Tensor.clone)


def _changed(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], names: set[str], change: Any
) -> Sample:
    tensors = [
        change(tensor) if argument in names and tensor.requires_grad else tensor
        for argument, _, tensor in named_inputs(schema, args, kwargs)
    ]
    changed: Sample = with_tensors((tuple(args), dict(kwargs)), tensors)
    return changed


def call_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if not isinstance(example, (tuple, list)):
        raise TypeError(
            f"check(op, ...): an example is a tuple of arguments, or (args, kwargs); got "
            f"{type(example).__name__}. Write (x,) for one argument."
        )
    if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], dict):
        return tuple(example[0]), dict(example[1])
    return tuple(example), {}


def is_call(handle: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the handle accepts structures and the arguments match its signature.

    A structure is an object that no schema type can represent, such as a dataclass.
    """
    try:
        handle.flat_arguments(args, kwargs)
    except Exception:
        return False
    return handle.takes_structures


def single(tensor: Tensor) -> Tensor:
    is_single = tensor.dtype in (torch.float32, torch.complex64)
    return tensor.clone().requires_grad_() if is_single else tensor


def double(tensor: Tensor) -> Tensor:
    """Return a copy in double precision that requires grad, or integers and bools unchanged."""
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return tensor
    dtype = torch.complex128 if tensor.dtype.is_complex else torch.double
    return tensor.to(dtype, copy=True).requires_grad_()
