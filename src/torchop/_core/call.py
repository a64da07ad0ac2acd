"""Find the tensors in arguments and results of calls, and replace arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

from torchop._schema.forms import Form
from torchop._schema.schema import Argument, Schema

# A call's arguments: (positional arguments, keyword arguments).
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def values_by_name(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call as a dict from names to values.

    Args:
        schema: a `Schema` of the operator.
        args: the positional arguments.
        kwargs: the keyword arguments.

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
    """Return a (name, value) pair for each argument in `places` that the call passes.

    `places` contains the (position, name) pairs of the arguments, like `Schema.mutated_places`.
    """
    return [
        (name, args[index] if index < len(args) else kwargs[name])
        for index, name in places
        if index < len(args) or name in kwargs
    ]


def mutated_tensors(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """Return the tensors that a call mutates, including tensors in lists.

    Args:
        schema: a `Schema` of the operator.
        args: the positional arguments.
        kwargs: the keyword arguments.

    Returns:
        Pairs of argument name and tensor, in the order of the schema.

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
    """Return the mutated arguments, i.e. the results of an in-place or out= operator."""
    if schema.form is Form.INPLACE:
        return (args[0],)
    return tuple(kwargs[name] for name in schema.mutated)


def returned_result(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Like `returned_arguments`, but unwrap the tuple if there is only one argument."""
    returned = returned_arguments(schema, args, kwargs)
    return returned if len(returned) > 1 else returned[0]


def as_tuple(schema: Schema, result: Any) -> tuple[Any, ...]:
    count = len(schema.returns)
    return tuple(result) if count > 1 else (result,) * count


def tensors_in(values: Iterable[Any], kind: Any = Tensor) -> Iterator[Any]:
    """Yield all instances of `kind` in `values`, including instances inside lists."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, kind))


def named_inputs(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors of a call, including tensors in lists.

    Args:
        schema: a `Schema` of the operator.
        args: the positional arguments.
        kwargs: the keyword arguments.

    Returns:
        For each tensor: the argument's name, a description for messages, and the tensor.

    Example:
        >>> import torch
        >>> from torchop.extend import Operator, named_inputs
        >>> schema = Operator("aten::cat", "my_tool").schema
        >>> [place for _, place, _ in named_inputs(schema, ([torch.ones(1), torch.ones(2)],), {})]
        ["input 'tensors[0]'", "input 'tensors[1]'"]
    """
    return named_tensors(values_by_name(schema, args, kwargs).items(), places=schema.places)


def named_tensors(
    values: Iterable[tuple[str, Any]],
    noun: str = "input",
    places: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (argument name, description, tensor) for each tensor in (argument name, value) pairs.

    The description, such as "input 'tensors[0]'", is meant for error messages and starts with
    `noun`. `places` maps argument names to the names to show in descriptions instead.
    """
    for name, value in values:
        for place, tensor in _places(places.get(name, name), value):
            yield name, f"{noun} '{place}'", tensor


def named_outputs(result: Any, places: Sequence[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a result, including tensors in lists.

    Args:
        result: the result of a call.
        places: the names of the results in descriptions. By default, results are numbered.

    Returns:
        For each tensor: a description for messages, and the tensor.

    Example:
        >>> import torch
        >>> from torchop.extend import named_outputs
        >>> [place for place, _ in named_outputs(torch.ones(2, 2).max(0))]
        ['output 0', 'output 1']
    """
    for index, output in enumerate(result if isinstance(result, tuple) else (result,)):
        is_named = index < len(places)
        yield from _places(places[index] if is_named else f"output {index}", output)


def _places(name: object, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield str(name), value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, Tensor):
                # A name that ends in "[*]" already stands for all items of the list, so it needs no
                # index (see `structure.items`).
                yield str(name) if str(name).endswith("[*]") else f"{name}[{index}]", item


def replaced(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a value, or to the items of a list, where they are instances of `kind`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, kind) for item in value):
        return [change(item) if isinstance(item, kind) else item for item in value]
    return value


def replace_all(
    args: Iterable[Any], kwargs: Mapping[str, Any], kind: Any, change: Callable[[Any], Any]
) -> Call:
    positional = tuple([replaced(value, kind, change) for value in args])
    return positional, {name: replaced(value, kind, change) for name, value in kwargs.items()}


def map_arguments(
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Argument, Any], Any],
) -> Call:
    positional = tuple(change(a, value) for a, value in zip(schema.positional, args, strict=False))
    keywords = {a.name: change(a, kwargs[a.name]) for a in schema.keyword_only if a.name in kwargs}
    return positional, keywords


def map_tensors(
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Argument, Tensor], Any],
) -> Call:
    """Replace each tensor of a call with `change(argument, tensor)`, including tensors in lists."""

    def changed(argument: Argument, value: Any) -> Any:
        return replaced(value, Tensor, functools.partial(change, argument))

    return map_arguments(schema, args, kwargs, changed)
