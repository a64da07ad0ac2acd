"""The backward of a derived formula as an operator, which compilers and vmap can call.

It takes the gradients of the outputs, the surroundings of the body, which inputs need gradients,
and the arguments of the operator; it returns these gradients. The kernel differentiates the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from torchop._compat import autograd, compilers, functorch
from torchop._core.call import tensors_in
from torchop._core.contract import storage_of
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError
from torchop._rules.autograd.derived.differentiate import (
    Rerun,
    output_tensors,
)
from torchop._rules.autograd.derived.saved_call import of_each_tensor, split_tensors, structured
from torchop._rules.autograd.gradients import in_fresh_memory
from torchop._rules.companions import define_companion, free_name
from torchop._rules.vmap.rule import VmapRule
from torchop._rules.vmap.sequential import map_elements, with_dims
from torchop._schema.text import arguments_of, write


def define_backward(definition: Definition) -> Definition:
    """Defines `name__backward`."""
    schema = definition.schema
    leading = (
        f"Tensor?[] {free_name('grad_outputs', schema)}",
        f"Tensor? {free_name('surroundings', schema)}",
        f"bool[] {free_name('needed', schema)}",
    )
    text = write([*leading, *arguments_of(schema.written)], "Tensor[]")

    @compilers.never_traced
    def backward(
        grads: Sequence[Tensor | None],
        surroundings: Tensor | None,
        needed: Sequence[bool],
        *args: Any,
        **kwargs: Any,
    ) -> list[Tensor]:
        call, tensors = split_tensors(args, kwargs)
        # A call of the dispatcher is below autograd. Any other call is differentiated itself.
        create_graph = not autograd.is_excluded()
        rerun = Rerun(definition, call, tensors, needed, surroundings)
        gradients = rerun.gradients(grads, create_graph=create_graph)
        storages = {storage_of(tensor) for tensor in tensors_in((*grads, *tensors))}
        return [
            in_fresh_memory(gradient, like, storages)
            for gradient, like in zip(gradients, compress(tensors, needed), strict=True)
        ]

    def fake(grads: Any, surroundings: Any, needed: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
        _, tensors = split_tensors(args, kwargs)
        return list(map(torch.empty_like, compress(tensors, needed)))

    companion = define_companion(
        definition, "backward", text, backward, fake, error=DerivedFormulaError
    )
    companion.rule(VmapRule).register(_vmap_rule(definition, companion))
    return companion


def _vmap_rule(definition: Definition, companion: Definition) -> Any:
    def backward(info: Any, in_dims: Any, *values: Any, **kwargs: Any) -> Any:
        mapped = any(dim is not None for dim in of_each_tensor(values[3:], in_dims[3:]))
        if mapped and callable(definition.plan[VmapRule]):
            return _through_rule(definition, info, in_dims, *values, **kwargs)
        # The dispatcher dropped trailing arguments that equal their default, which have no dim.
        dims = (*in_dims, *[None] * (len(values) - len(in_dims)))
        with functorch.without_randomness_of_vmap():
            arguments = list(map(with_dims, values, dims))
            stacked = map_elements(companion, info.batch_size, arguments, kwargs)
        return stacked, [0] * len(stacked)

    return backward


def _through_rule(
    definition: Definition,
    info: Any,
    in_dims: Any,
    grads: Sequence[Tensor | None],
    surroundings: Tensor | None,
    needed: Sequence[bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[list[Tensor], list[int]]:
    """Differentiates the vmap rule of the operator, for all elements at once."""
    rule = definition.plan[VmapRule]
    assert callable(rule)  # the caller has checked
    call, tensors = split_tensors(args, kwargs)
    dims = of_each_tensor(args, in_dims[3:])
    size = info.batch_size
    # The elements share some inputs, but each has a gradient for them.
    batched = [
        _in_front(tensor, dim, size) if need else tensor
        for tensor, dim, need in zip(tensors, dims, needed, strict=True)
    ]
    batched_dims = [0 if need else dim for dim, need in zip(dims, needed, strict=True)]
    returns = definition.schema.returns
    rule_dims = structured(definition.schema.positional, args, batched_dims)

    def run(inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The outputs of the rule, with the elements in front."""
        rule_args, keywords = call.with_tensors(inputs)
        result, out_dims = rule(info, rule_dims, *rule_args, **keywords)
        results, out_dims = (result, out_dims) if len(returns) > 1 else ((result,), (out_dims,))
        return [
            None if output is None else _in_front(output, dim, size)
            for output, dim in zip(
                output_tensors(returns, results), of_each_tensor(results, out_dims), strict=True
            )
        ]

    grads_in_front = [
        None if grad is None else _in_front(grad, dim, size)
        for grad, dim in zip(grads, in_dims[0] or [None] * len(grads), strict=True)
    ]
    rerun = Rerun(definition, call, batched, needed, surroundings)
    gradients = rerun.gradients(grads_in_front, create_graph=torch.is_grad_enabled(), run=run)
    return gradients, [0] * len(gradients)


def _in_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
