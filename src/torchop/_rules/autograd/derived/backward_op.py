"""The backward of a derived formula as an operator, which compilers and vmap can call.

It takes the gradients of the outputs, what the body found around it, which gradients are asked for,
and the arguments of the operator; it returns these gradients. The kernel differentiates the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import autograd, compilers, functorch
from torchop._core.contract import storage_of, tensors_in
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError
from torchop._rules.autograd.derived.differentiate import gradients, output_tensors, source
from torchop._rules.autograd.derived.replay import replayed
from torchop._rules.autograd.derived.saved_call import taken_apart
from torchop._rules.companions import define_companion, free_name
from torchop._rules.functionalization.counterparts import parts_of_schema
from torchop._rules.vmap.rule import VmapRule


def define_backward(definition: Definition) -> Definition:
    """Defines `name__backward`."""
    schema = definition.schema
    own = (
        f"Tensor?[] {free_name('grad_outputs', schema)}",
        f"Tensor? {free_name('surroundings', schema)}",
        f"bool[] {free_name('needed', schema)}",
    )
    arguments, _ = parts_of_schema(schema.written)

    @compilers.never_traced
    def backward(
        grads: Sequence[Tensor | None],
        surroundings: Tensor | None,
        needed: Sequence[bool],
        *args: Any,
        **kwargs: Any,
    ) -> list[Tensor]:
        call, tensors = taken_apart(args, kwargs)
        # Called by the dispatcher, it is below autograd. Otherwise it is differentiated itself.
        differentiated = not autograd.is_excluded()
        found = gradients(
            definition, call, tensors, needed, grads, surroundings, create_graph=differentiated
        )
        wanted = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
        taken = {storage_of(tensor) for tensor in tensors_in((*grads, *tensors))}
        return [as_described(g, like, taken) for g, like in zip(found, wanted, strict=True)]

    def fake(grads: Any, surroundings: Any, needed: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
        _, tensors = taken_apart(args, kwargs)
        return [torch.empty_like(t) for t, need in zip(tensors, needed, strict=True) if need]

    companion = define_companion(
        definition,
        "backward",
        f"({', '.join((*own, *arguments))}) -> Tensor[]",
        backward,
        fake,
        error=DerivedFormulaError,
    )
    companion.rule(VmapRule).register(_vmap_rule(definition, companion))
    return companion


def as_described(gradient: Tensor, like: Tensor, taken: set[int]) -> Tensor:
    """A gradient in memory of its own, laid out as the fake kernel says: compilers rely on both.

    Args:
        gradient: what autograd found; it may be expanded, or a gradient that came in.
        like: the input that it belongs to.
        taken: the memory that is in use; that of the result is added.
    """
    strided = gradient.layout is torch.strided and like.layout is torch.strided
    if strided and gradient.stride() != torch.empty_like(like, device="meta").stride():
        gradient = torch.empty_like(like).copy_(gradient)
    elif storage_of(gradient) in taken:
        gradient = torch.empty_like(like).copy_(gradient) if strided else gradient.clone()
    taken.add(storage_of(gradient))
    return gradient


def _vmap_rule(definition: Definition, companion: Definition) -> Any:
    def backward(info: Any, in_dims: Any, *values: Any, **kwargs: Any) -> Any:
        mapped = any(dim is not None for dim in _flat_dims(values[3:], in_dims[3:]))
        if mapped and callable(definition.plan[VmapRule]):
            return _through_rule(definition, info, in_dims, *values, **kwargs)
        return in_turn(companion, info, in_dims, values, kwargs)

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
    """Differentiates the vmap rule of the operator: all elements at once."""
    rule = definition.plan[VmapRule]
    assert callable(rule)  # it was asked for
    call, tensors = taken_apart(args, kwargs)
    dims = _flat_dims(args, in_dims[3:])
    # An element has a gradient of its own for an input that all elements share.
    spread = [
        _in_front(tensor, dim, info.batch_size) if need else tensor
        for tensor, dim, need in zip(tensors, dims, needed, strict=True)
    ]
    new_dims = iter([0 if need else dim for dim, need in zip(dims, needed, strict=True)])
    structure = tuple(
        [next(new_dims) if isinstance(item, Tensor) else None for item in value]
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)
        else next(new_dims)
        if isinstance(value, Tensor)
        else None
        for value in args
    )
    create_graph = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in tensors_in((*grads, *tensors))
    )
    with (
        functorch.without_randomness_of_vmap(),
        replayed(surroundings, (*args, *kwargs.values())),
        autograd.above_autograd(),
    ):
        inputs = [source(t) if need else t for t, need in zip(spread, needed, strict=True)]
        own, keywords = call.filled(inputs)
        result, out_dims = rule(info, structure, *own, **keywords)
        several = len(definition.schema.returns) > 1
        returns = definition.schema.returns
        outputs = list(output_tensors(returns, result))
        flat_dims = _flat_dims(
            result if several else (result,), out_dims if several else (out_dims,)
        )
        flowing = [
            (_in_front(output, dim, info.batch_size), _in_front(grad, grad_dim, info.batch_size))
            for output, dim, grad, grad_dim in zip(
                outputs, flat_dims, grads, in_dims[0] or [None] * len(grads), strict=True
            )
            if output is not None and grad is not None and output.requires_grad
        ]
        sources = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        found = (
            torch.autograd.grad(
                [output for output, _ in flowing],
                sources,
                [grad for _, grad in flowing],
                allow_unused=True,
                create_graph=create_graph,
            )
            if flowing
            else [None] * len(sources)
        )
    results = [torch.zeros_like(t) if g is None else g for t, g in zip(sources, found, strict=True)]
    return results, [0] * len(results)


def in_turn(
    companion: Definition, info: Any, in_dims: Any, values: Any, kwargs: Any
) -> tuple[list[Tensor], list[int]]:
    """Calls the operator once for each element."""

    def element(value: Any, dim: Any, index: int) -> Any:
        if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [element(item, d, index) for item, d in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, index)

    # The dispatcher dropped trailing arguments that equal their default, which have no dimension.
    dims = (*in_dims, *[None] * (len(values) - len(in_dims)))
    with functorch.without_randomness_of_vmap():
        results = [
            companion.overload(
                *(element(v, d, index) for v, d in zip(values, dims, strict=True)), **kwargs
            )
            for index in range(info.batch_size)
        ]
    stacked = [torch.stack(each) for each in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)


def _in_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _flat_dims(values: Sequence[Any], dims: Sequence[Any]) -> list[int | None]:
    """The dimension of each tensor among the values, in their order."""
    flat: list[int | None] = []
    for value, dim in zip(values, dims, strict=False):
        if isinstance(value, (list, tuple)):
            each = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
            flat += [d for item, d in zip(value, each, strict=True) if isinstance(item, Tensor)]
        elif isinstance(value, Tensor):
            flat.append(dim)
    return flat
