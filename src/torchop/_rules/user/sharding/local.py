"""Calls whose formula must see the tensors of its rank: opaque ones, and those in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import dtensor, dtensor_calls
from torchop._compat.classes import OpOverload
from torchop._compat.dtensor import Row
from torchop._errors import ShardingError
from torchop._rules.user.sharding.derived import (
    gradients_of_inputs,
    gradients_of_results,
    is_transposable,
)
from torchop._rules.user.sharding.rule import SHARDING


class LocalCall(NamedTuple):
    """A call that was made on the shards of this rank, and where its gradients belong.

    Attributes:
        op: the name of the operator.
        args: the positional arguments, with the shard of this rank for each tensor.
        kwargs: those by keyword.
        result: what the operator returned for them.
        mesh: the device mesh.
        results_placed: for each result, the placements that its gradient has to have.
        inputs_placed: for each tensor, the placements of its gradient; None for a plain tensor.
        shapes: for each tensor, the shape on this rank, and that of the whole with its strides.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    mesh: Any
    results_placed: list[tuple[Any, ...]]
    inputs_placed: list[tuple[Any, ...] | None]
    shapes: list[tuple[Any, Any, Any]]


def call_on_shards(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, LocalCall]:
    """Calls an operator on the shards of this rank; returns DTensors, and what was called."""
    registration = SHARDING.registration(op)
    if registration is None:
        raise SHARDING.missing_error(op)
    shards = dtensor_calls.on_shards(registration, args, kwargs, is_transposable)
    result = op(*shards.args, **shards.kwargs)
    dims = range(shards.mesh.ndim)
    rows = [
        Row(
            [spec.placements[dim] for spec in shards.results],
            [spec.placements[dim] for spec in shards.inputs],
        )
        for dim in dims
    ]
    of_results = [gradients_of_results(row.results) for row in rows]
    of_inputs = [gradients_of_inputs(row) for row in rows]
    tensors = dtensor.tree_leaves((args, kwargs))
    plain = [not dtensor.has_dtensors(t) for t in tensors if isinstance(t, Tensor)]
    local = [t for t in dtensor.tree_leaves((shards.args, shards.kwargs)) if isinstance(t, Tensor)]
    call = LocalCall(
        op.name(),
        shards.args,
        shards.kwargs,
        result,
        shards.mesh,
        [tuple(row[index] for row in of_results) for index in range(len(shards.results))],
        [
            None if is_plain else tuple(row[index] for row in of_inputs)
            for index, is_plain in enumerate(plain)
        ],
        [
            (tensor.shape, spec.tensor_meta.shape, spec.tensor_meta.stride)
            for tensor, spec in zip(local, shards.inputs, strict=True)
        ],
    )
    return dtensor_calls.wrapped(op, args, kwargs, result, shards.output_specs), call


def grads_on_shards(call: LocalCall, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the results, one for each tensor, as those of this rank's shards."""
    if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
        raise ShardingError(
            f"{call.op}: a second derivative reached a formula that sees the shards of a rank, "
            "which are not in the graph. Register a formula of operators that PyTorch knows, "
            "without opaque=True."
        )
    return [
        grad
        if grad is None or not dtensor.has_dtensors(grad)
        else dtensor_calls.shard_of(grad, call.mesh, placements)
        for grad, placements in zip(grads, call.results_placed, strict=True)
    ]


def gradients_as_dtensors(
    call: LocalCall, gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the inputs, one for each positional tensor, as the caller's DTensors."""
    return [
        gradient if gradient is None else _wrapped(call, index, gradient)
        for index, gradient in enumerate(gradients)
    ]


def _wrapped(call: LocalCall, index: int, gradient: Tensor) -> Tensor:
    placements = call.inputs_placed[index]
    local_shape, shape, stride = call.shapes[index]
    if gradient.shape != local_shape:
        gradient = gradient.sum_to_size(local_shape)
    if placements is not None:
        return dtensor_calls.as_dtensor(gradient, call.mesh, placements, shape, stride)
    replicated = gradients_of_results(_of_plain(call))
    pending = dtensor_calls.as_dtensor(gradient, call.mesh, _of_plain(call), shape, stride)
    return dtensor_calls.shard_of(pending, call.mesh, replicated)


def _of_plain(call: LocalCall) -> list[Any]:
    """The placements of the gradient of a plain tensor, which is replicated without saying so."""
    from torch.distributed.tensor import Partial, Replicate  # for start-up time

    others = [p for p in call.inputs_placed if p is not None]
    return [
        Replicate() if all(p[dim].is_replicate() for p in others) else Partial()
        for dim in range(call.mesh.ndim)
    ]
