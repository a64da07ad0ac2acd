"""The arguments of a call: which there are, the tensors among them, and how each is changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from torchop._schema.forms import Form
from torchop._schema.schema import Argument, Schema

# The arguments by position, and by name.
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def values_by_name(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments that a call passes, by name.

    Args:
        schema: a `Schema` of the operator.
        args: the arguments by position.
        kwargs: those by keyword.

    Example:
        >>> from torchop.extend import Operator, values_by_name
        >>> schema = Operator("aten::add.Tensor", "my_tool").schema
        >>> values_by_name(schema, (1, 2), {"alpha": 3})
        {'self': 1, 'other': 2, 'alpha': 3}
    """
    return {**dict(zip((a.name for a in schema.positional), args, strict=False)), **kwargs}


def passed(
    places: Iterable[tuple[int, str]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Some arguments of a call, of `Schema.places`, without those that the call left out."""
    return [
        (name, args[index] if index < len(args) else kwargs[name])
        for index, name in places
        if index < len(args) or name in kwargs
    ]


def mutated_tensors(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """Returns the tensors that a call writes into, those inside lists included.

    Args:
        schema: a `Schema` of the operator.
        args: the arguments by position.
        kwargs: those by keyword.

    Returns:
        Pairs of the argument's name and the tensor, in the order of the schema, however the call
        spelled them.

    Example:
        >>> import torch
        >>> from torchop.extend import Operator, mutated_tensors
        >>> schema = Operator("aten::add_.Tensor", "my_tool").schema
        >>> mutated_tensors(schema, (torch.zeros(1), torch.ones(1)), {})
        [('self', tensor([0.]))]
    """
    written = passed(schema.mutated_places, args, kwargs)
    return [(name, tensor) for name, _, tensor in named_tensors(written)]


def returned_arguments(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """What an in-place operator, or one with `out=`, has to return for a call."""
    if schema.form is Form.INPLACE:
        return (args[0],)
    return tuple(kwargs[name] for name in schema.mutated)


def returned_result(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same, as the call returns it: one tensor, or a tuple of several."""
    returned = returned_arguments(schema, args, kwargs)
    return returned if len(returned) > 1 else returned[0]


def tensors_in(values: Iterable[Any], kind: Any = Tensor) -> Iterator[Any]:
    """The tensors among arguments or results, or what stands for them; those in lists included."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, kind))


def named_inputs(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the tensors of a call, those inside lists included.

    Args:
        schema: a `Schema` of the operator.
        args: the arguments by position.
        kwargs: those by keyword.

    Returns:
        For each tensor the argument's name, what messages call the place, and the tensor.

    Example:
        >>> import torch
        >>> from torchop.extend import Operator, named_inputs
        >>> schema = Operator("aten::cat", "my_tool").schema
        >>> [place for _, place, _ in named_inputs(schema, ([torch.ones(1), torch.ones(2)],), {})]
        ["input 'tensors[0]'", "input 'tensors[1]'"]
    """
    return named_tensors(values_by_name(schema, args, kwargs).items())


def named_tensors(
    values: Iterable[tuple[str, Any]], noun: str = "input"
) -> Iterator[tuple[str, str, Tensor]]:
    """The same as `named_inputs`, for some arguments of a call and their names."""
    for name, value in values:
        for place, tensor in _places(name, value):
            yield name, f"{noun} '{place}'", tensor


def named_outputs(result: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a result, those inside lists included.

    Args:
        result: what a call returned.

    Returns:
        For each tensor what messages call the place, and the tensor.

    Example:
        >>> import torch
        >>> from torchop.extend import named_outputs
        >>> [place for place, _ in named_outputs(torch.ones(2, 2).max(0))]
        ['output 0', 'output 1']
    """
    for index, output in enumerate(result if isinstance(result, tuple) else (result,)):
        for place, tensor in _places(index, output):
            yield f"output {place}", tensor


def _places(name: object, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one argument or result, each with its place there."""
    if isinstance(value, Tensor):
        yield str(name), value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, Tensor):
                yield f"{name}[{index}]", item


def replaced(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """A value with `change(item)` for what is of a class: itself, or the items of a list."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, kind) for item in value):
        return [change(item) if isinstance(item, kind) else item for item in value]
    return value


def replace_all(
    args: Iterable[Any], kwargs: Mapping[str, Any], kind: Any, change: Callable[[Any], Any]
) -> Call:
    """The same for each argument of a call."""
    positional = tuple([replaced(value, kind, change) for value in args])
    return positional, {name: replaced(value, kind, change) for name, value in kwargs.items()}


def map_arguments(
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Argument, Any], Any],
) -> Call:
    """The arguments of a call, each replaced by `change(argument, value)`."""
    positional = tuple(change(a, value) for a, value in zip(schema.positional, args, strict=False))
    keywords = {a.name: change(a, kwargs[a.name]) for a in schema.keyword_only if a.name in kwargs}
    return positional, keywords


def map_tensors(
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Argument, Tensor], Any],
) -> Call:
    """The same, for each tensor among them, those inside lists included."""

    def changed(argument: Argument, value: Any) -> Any:
        return replaced(value, Tensor, functools.partial(change, argument))

    return map_arguments(schema, args, kwargs, changed)
