"""Compute the rows that a sharding rule allows for a call.

A row lists the placements of all tensors of the call on one dimension of the device mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torchop._compat.dtensor_calls import Row, is_one, same_size
from torchop._errors import ShardingError
from torchop._rules.user.sharding.notation import ANY, UNNAMED, Operand, Sharding, spaced
from torchop.extend import short_repr

Shape: TypeAlias = Sequence[Any]  # of int, or of torch.SymInt


class CallTensor(NamedTuple):
    """An input tensor of a call."""

    operand: int
    shape: Shape
    is_mutated: bool = False


class _Dimensions(NamedTuple):
    names: list[str]
    shape: Shape
    what: str


def rows(
    op: str, rule: Sharding, arguments: Sequence[CallTensor], results: Sequence[Shape]
) -> list[Row]:
    """Return the rows, i.e. the ways to shard a call, that a sharding rule allows.

    The first row replicates all tensors, and every other row either shards one dimension or uses
    the linearity of the operator.

    `arguments` includes the tensors in lists. `results` contains the global shapes of the results.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard  # slow import

    inputs = [(rule.arguments[t.operand], t.shape, f"argument {t.operand}") for t in arguments]
    pairs = enumerate(zip(_of_results(op, rule, len(results)), results, strict=True))
    outputs = [(operand, shape, f"result {index}") for index, (operand, shape) in pairs]
    width = max((o.count_any(len(shape)) for o, shape, _ in (*inputs, *outputs)), default=0)
    named_inputs, named_outputs = (
        [_named(op, rule, width, *tensor) for tensor in side] for side in (inputs, outputs)
    )
    written = [
        named for named, tensor in zip(named_inputs, arguments, strict=True) if tensor.is_mutated
    ]
    replicate = Replicate()
    table = [Row([replicate] * len(results), [replicate] * len(arguments))]
    for name in dict.fromkeys(name for named in named_inputs for name in named.names):
        label = ANY if name.startswith(ANY) else name
        if name == UNNAMED or label in rule.whole:
            continue
        reduction = rule.reduce.get(label)
        has_it = [name in named.names for named in named_outputs]
        if not (all(has_it) or reduction) or any(name not in named.names for named in written):
            continue  # the dimension cannot be sharded
        size = _size(op, rule, name, named_inputs, (*named_outputs, *written))
        # A tensor that is broadcast along this dimension only has size 1 there, so replicate it.
        placed: list[Any] = [
            Shard(named.names.index(name))
            if name in named.names and not _is_broadcast(named, name, size)
            else replicate
            for named in named_inputs
        ]
        results_placed: list[Any] = [
            Shard(named.names.index(name)) if here else Partial(reduction or "sum")
            for named, here in zip(named_outputs, has_it, strict=True)
        ]
        table.append(Row(results_placed, placed, None if all(has_it) else reduction))
    for group in rule.linear:
        for reduction in ("sum", "avg"):
            pending = Partial(reduction)
            placed = [pending if tensor.operand in group else replicate for tensor in arguments]
            if pending in placed:
                table.append(Row([pending] * len(results), placed))
    return table


def _of_results(op: str, rule: Sharding, count: int) -> list[Operand]:
    operands = list(rule.results)
    if len(operands) == 1 and operands[0].is_list:
        return operands * count
    if len(operands) != count:
        raise ShardingError(
            f"{op}: the sharding rule {rule.shown} has {len(operands)} operands after '->', but "
            f"the call returned {count} tensors."
        )
    return operands


def _named(
    op: str, rule: Sharding, width: int, operand: Operand, shape: Shape, what: str
) -> _Dimensions:
    names = operand.dimensions(len(shape), width)
    if names is None:
        raise ShardingError(
            f"{op}: the operand {short_repr(str(operand))} of the sharding rule {rule.shown} does "
            f"not fit {what}, which has {len(shape)} dimensions: {list(shape)}."
            f"{spaced(str(operand))}"
        )
    return _Dimensions(names, shape, what)


def _size(
    op: str,
    rule: Sharding,
    name: str,
    inputs: Sequence[_Dimensions],
    exact: Sequence[_Dimensions],
) -> Any:
    """Return the size of a dimension. Raise if tensors of the call disagree on it.

    In an input, the dimension may have size 1 and be broadcast. But if a result or a mutated tensor
    (the tensors in `exact`) has size 1 where an input does not, the operator has reduced the
    dimension, so the sharding rule is wrong.
    """
    size: Any = 1
    for named in inputs:
        for other, each in zip(named.names, named.shape, strict=True):
            if other == name and is_one(size):
                size = each
    for named in (*inputs, *exact):
        for other, each in zip(named.names, named.shape, strict=True):
            if other != name or same_size(each, size):
                continue
            if is_one(each) and not any(named is result for result in exact):
                continue
            shown = short_repr(ANY if name.startswith(ANY) else name)
            raise ShardingError(
                f"{op}: the sharding rule {rule.shown} has one name, {shown}, for dimensions of "
                f"different size: {named.what} of shape {list(named.shape)} has {each}, others "
                f"have {size}. If the operator changes the dimension, give the result's "
                "dimension another name, or write '.'."
            )
    return size


def _is_broadcast(named: _Dimensions, name: str, size: Any) -> bool:
    return is_one(named.shape[named.names.index(name)]) and not is_one(size)
