"""The vmap rule `"sequential"`: call the operator once per element and stack the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import compilers, fake_tensors, functorch, tracing
from torchop._core.call import Call, named_tensors, passed, replace_all, returned_result, tensors_in
from torchop._core.definition import Definition
from torchop._core.generators import generators_of
from torchop._errors import MutationError, ResultError, short_repr
from torchop._schema.forms import Form


class _Mapped:
    __slots__ = ("dim", "tensor")

    def __init__(self, tensor: Tensor, dim: int) -> None:
        self.tensor = tensor
        self.dim = dim


def with_dims(value: Any, dim: Any) -> Any:
    """Wrap the batched tensors of an argument in `_Mapped`.

    `dim` is the argument's entry in `in_dims`.
    """
    if isinstance(dim, (list, tuple)):
        return [with_dims(*pair) for pair in zip(value, dim, strict=True)]
    return value if dim is None else _Mapped(value, dim)


def map_call(definition: Definition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle a call for the innermost `vmap` by calling the operator once per element."""
    schema = definition.schema
    vmap = functorch.current_vmap()
    args, kwargs = schema.fill_defaults(args, kwargs)
    mapped, mapped_kwargs = replace_all(
        args, kwargs, Tensor, lambda tensor: with_dims(*vmap.unwrap(tensor))
    )
    random = torch.Tag.nondeterministic_seeded in definition.overload.tags
    if random and vmap.randomness == "error":
        raise RuntimeError(
            f"{definition} was called in vmap, and draws random numbers "
            '(torch.Tag.nondeterministic_seeded). Choose one: vmap(..., randomness="different") '
            'draws new numbers for each element, randomness="same" draws once.'
        )
    with functorch.below_vmap():
        is_mapped = any(tensors_in((*mapped, *mapped_kwargs.values()), _Mapped))
        if not is_mapped and not (random and vmap.randomness == "different"):
            return definition.overload(*mapped, **mapped_kwargs)
        _check_written(definition, vmap.batch_size, mapped, mapped_kwargs)
        replay = random and vmap.randomness == "same"
        result = map_elements(definition, vmap.batch_size, mapped, mapped_kwargs, replay=replay)
        if schema.form is not Form.PLAIN:
            return returned_result(schema, args, kwargs)
        if len(schema.returns) > 1:
            return tuple(_wrapped(vmap, output) for output in result)
        return _wrapped(vmap, result)


def map_elements(
    definition: Definition,
    batch_size: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    replay: bool = False,
) -> Any:
    """Call the operator once per element of a batch and stack the results along dimension 0.

    The caller must have wrapped batched tensors with `with_dims`. If `replay` is true, all elements
    draw the same random numbers. In-place and out= operators write their results into the batch, so
    return None for them.
    """
    schema = definition.schema
    elements = [_element(args, kwargs, index) for index in range(batch_size)]
    stack: Callable[..., Tensor] = torch.stack
    if elements or schema.form is not Form.PLAIN or not schema.returns:
        results = _results(definition, elements, replay)
    else:
        results, stack = [result_of_one(definition, args, kwargs)], _empty_batch
    if schema.form is not Form.PLAIN:
        return None
    if len(schema.returns) <= 1:
        return _combined(definition, results, "its result", stack)
    return tuple(
        _combined(definition, outputs, f"output {index}", stack)
        for index, outputs in enumerate(zip(*results, strict=True))
    )


def _wrapped(vmap: functorch.Vmap, output: Any) -> Any:
    if isinstance(output, list):
        return [_wrapped(vmap, item) for item in output]
    return vmap.wrap(output) if isinstance(output, Tensor) else output


def _element(args: Sequence[Any], kwargs: Mapping[str, Any], index: int) -> Call:
    return replace_all(args, kwargs, _Mapped, lambda m: m.tensor.select(m.dim, index))


def _results(definition: Definition, elements: list[Call], replay: bool) -> list[Any]:
    if not replay or not elements:
        return [definition.overload(*args, **kwargs) for args, kwargs in elements]
    args, kwargs = elements[0]  # all elements have the same devices and generators
    values = (*args, *kwargs.values())
    if any(map(tracing.is_traced, tensors_in(values))):
        raise RuntimeError(
            f'{definition} draws random numbers, and vmap(..., randomness="same") resets the '
            "generator for each element. A compiler cannot trace this. Compile with "
            'randomness="different", or draw the numbers outside and pass them.'
        )
    states = [(generator, generator.get()) for generator in generators_of(values)]
    results = []
    for args, kwargs in elements:
        for generator, state in states:
            generator.set(state)
        results.append(definition.overload(*args, **kwargs))
    return results


def _check_written(
    definition: Definition, batch_size: int, mapped: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    for name, value in passed(definition.schema.mutated_places, mapped, kwargs):
        for _, where, _ in named_tensors([(name, value)], "argument"):
            raise MutationError(
                f"{definition}: {where} is written, but vmap does not map over it, so all "
                "elements of the batch would write into the same tensor. Map over it too "
                "(in_dims)."
            )
        for mapped_tensor in tensors_in([value], _Mapped):
            if batch_size > 1 and mapped_tensor.tensor.stride(mapped_tensor.dim) == 0:
                raise MutationError(
                    f"{definition}: argument {name!r} is written, but the elements of the batch "
                    "share memory, as after expand(). Pass a .clone()."
                )


def result_of_one(definition: Definition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with fake_tensors.fake_calls() as make_fake:

        def fake_element(value: _Mapped | Tensor) -> Tensor:
            if isinstance(value, Tensor):
                return make_fake(value.shape, value)
            shape = list(value.tensor.shape)
            del shape[value.dim]
            return make_fake(shape, value.tensor)

        args, kwargs = replace_all(args, kwargs, (_Mapped, Tensor), fake_element)
        return definition.overload(*args, **kwargs)


def _empty_batch(elements: Sequence[Tensor]) -> Tensor:
    (element,) = elements
    return torch.empty((0, *element.shape), dtype=element.dtype, device=element.device)


def _check_sizes_are_known(definition: Definition, outputs: Sequence[Tensor], what: str) -> None:
    """Raise if Dynamo is tracing and an output has a data-dependent size.

    Dynamo records one call for the whole batch, whose result has the unbacked sizes of just one
    element, so it would report the sizes of the other elements as a bug in the fake kernel.
    """
    if len(outputs) > 1 and compilers.dynamo_is_tracing():
        for dim, size in enumerate(outputs[0].shape):
            if fake_tensors.number_of(size) is None:
                raise ResultError(
                    f"{definition}: the vmap rule 'sequential' cannot be compiled here: dimension "
                    f"{dim} of {what} depends on data, and may differ between the elements. Call "
                    "torch.vmap outside of the compiled function, or loop over the batch."
                )


def _combined(
    definition: Definition, outputs: Sequence[Any], what: str, stack: Callable[..., Tensor]
) -> Any:
    if not outputs:
        return None  # the batch is empty, and the operator returns nothing
    first = outputs[0]
    kinds = {type(output) if output is None else isinstance(output, Tensor) for output in outputs}
    if all(isinstance(output, Tensor) for output in outputs):
        # Symbolic sizes are not hashable, so the shapes cannot be collected in a set.
        other = next((o for o in outputs if fake_tensors.shapes_differ(first, o)), None)
        if other is None:
            _check_sizes_are_known(definition, outputs, what)
            return stack(outputs)
        difference = (
            f"{what} has the shape {list(first.shape)} for one and {list(other.shape)} for another"
        )
    elif all(isinstance(output, list) for output in outputs):
        lengths = list(dict.fromkeys(map(len, outputs)))
        if len(lengths) == 1:
            return [
                _combined(definition, items, f"{what}[{index}]", stack)
                for index, items in enumerate(zip(*outputs, strict=True))
            ]
        difference = f"{what} has {lengths[0]} tensors for one and {lengths[1]} for another"
    elif len(kinds) > 1:
        difference = f"{what} is None for some only"
    else:
        unequal = [output for output in outputs if output != first]
        if not unequal:
            return first
        difference = (
            f"{what} is {short_repr(first)} for one and {short_repr(unequal[0])} for another"
        )
    raise ResultError(
        f"{definition}: the vmap rule 'sequential' cannot combine the results of the elements into "
        f"one: {difference}."
    )
