"""Calls whose formula must see the tensors of its rank: opaque ones, and those in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchop._compat import dtensor, dtensor_registry, simulated_ranks
from torchop._compat.classes import tree_leaves
from torchop._compat.dtensor_calls import Row
from torchop._compat.dtensor_registry import Registration
from torchop._errors import ShardingError
from torchop._rules.user.sharding.derived import (
    gradients_of_inputs,
    gradients_of_results,
    is_transposable,
)


class LocalCall:
    """A call that was made on the shards of this rank, and where its gradients belong.

    Attributes:
        args: the positional arguments, with the shard of this rank for each tensor.
        kwargs: those by keyword.
        result: what the operator returned for them.
        output: the same as DTensors.
    """

    def __init__(
        self, registration: Registration, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        op = registration.op
        shards = dtensor_registry.on_shards(registration, args, kwargs, is_transposable)
        self._op = op.name()
        self.args, self.kwargs, self._mesh = shards.args, shards.kwargs, shards.mesh
        self.result = op(*shards.args, **shards.kwargs)
        self.output = dtensor_registry.wrapped(op, args, kwargs, self.result, shards.output_specs)
        rows = [
            Row(
                [spec.placements[dim] for spec in shards.results],
                [spec.placements[dim] for spec in shards.inputs],
            )
            for dim in range(shards.mesh.ndim)
        ]
        # For each result, the placements that its gradient has to have.
        self._results_placed = list(
            zip(*(gradients_of_results(row.results) for row in rows), strict=True)
        )
        # For each tensor, the placements of its gradient; None for a plain tensor.
        inputs_placed = zip(*(gradients_of_inputs(row) for row in rows), strict=True)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._inputs_placed = [
            placements if dtensor.has_dtensors(tensor) else None
            for tensor, placements in zip(tensors, inputs_placed, strict=True)
        ]
        # For each tensor, the shape on this rank, and that of the whole with its strides.
        local = tree_leaves((shards.args, shards.kwargs))
        self._shapes = [
            (tensor.shape, spec.tensor_meta.shape, spec.tensor_meta.stride)
            for tensor, spec in zip(
                (value for value in local if isinstance(value, Tensor)), shards.inputs, strict=True
            )
        ]

    def forget(self) -> None:
        """Drops the tensors."""
        self.args, self.kwargs, self.result = (), {}, None

    def gradients(
        self, formula: Callable[..., Any], ctx: Any, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of the positional tensors, as the caller's DTensors.

        Args:
            formula: takes a context and the gradients of the results on this rank, and returns
                those of the positional tensors.
            ctx: the context.
            grads: the gradients of the results.
        """
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            raise ShardingError(
                f"{self._op}: a second derivative reached a formula that sees the shards of a "
                "rank, which are not in the graph. Register a formula of operators that PyTorch "
                "knows, without opaque=True."
            )
        shards = [
            grad
            if grad is None or not dtensor.has_dtensors(grad)
            else dtensor_registry.shard_of(grad, self._mesh, placements)
            # Results that have no gradient, the residuals of a kernel, come last.
            for grad, placements in zip(grads, self._results_placed, strict=False)
        ]
        on_rank = _on_each_rank(formula) if simulated_ranks.are_simulated() else formula
        return [
            gradient if gradient is None else self._wrapped(index, gradient)
            for index, gradient in enumerate(on_rank(ctx, *shards))
        ]

    def _wrapped(self, index: int, gradient: Tensor) -> Tensor:
        placements = self._inputs_placed[index]
        local_shape, shape, stride = self._shapes[index]
        if gradient.shape != local_shape:
            gradient = gradient.sum_to_size(local_shape)
        if placements is not None:
            return dtensor_registry.as_dtensor(gradient, self._mesh, placements, shape, stride)
        of_plain = self._of_plain()
        pending = dtensor_registry.as_dtensor(gradient, self._mesh, of_plain, shape, stride)
        return dtensor_registry.shard_of(pending, self._mesh, gradients_of_results(of_plain))

    def _of_plain(self) -> list[Any]:
        """The placements of the gradient of a plain tensor, which DTensor takes for replicated."""
        from torch.distributed.tensor import Partial, Replicate  # for start-up time

        others = [p for p in self._inputs_placed if p is not None]
        return [
            Replicate() if all(p[dim].is_replicate() for p in others) else Partial()
            for dim in range(self._mesh.ndim)
        ]


def _on_each_rank(gradients_of: Callable[..., Any]) -> Callable[..., Any]:
    """Shows a formula the context and the gradients of one simulated rank after the other."""

    def of_all_ranks(ctx: Any, *grads: Any) -> Any:
        attributes = {n: v for n, v in vars(ctx).items() if not n.startswith("_torchop_")}
        attributes |= {"saved_tensors": ctx.saved_tensors, "needs_input_grad": ctx.needs_input_grad}

        def of_one(attributes: Any, *grads: Any) -> Any:
            return gradients_of(SimpleNamespace(**attributes), *grads)

        return simulated_ranks.on_each_rank(of_one)(attributes, *grads)

    return of_all_ranks
