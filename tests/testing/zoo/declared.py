"""Operators whose right behaviour depends on conditions that they declare and do not check.

Most have no examples: these are made from the declaration. What the kernels would do with other
arguments is no fault; the wrong ones do wrong with arguments that are allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints

from tests.testing.zoo.specimen import define, like, raw, right, wrong
from torchop import preconditions as pre


def enter(
    name: str,
    function: Callable[..., Any],
    preconditions: dict[str, Any],
    check: str | None = None,
    reference: Callable[..., Any] | None = None,
    examples: Callable[[], list[Any]] | None = None,
    **options: Any,
) -> None:
    """Enters an operator with its preconditions; with a check, a wrong one."""
    op = define(name, function, **options)
    op.register_preconditions(preconditions)
    if check is None:
        right(op, examples or op.examples)
    else:
        wrong(op, check, examples or op.examples, reference)


def memory_of(x: Tensor) -> Tensor:
    """The memory from where a tensor starts, as a kernel sees it that takes the address."""
    return raw(x)[x.storage_offset() :]


# --------------------------------------------------------------------------------------------------
# Bags of rows of a table


def bags(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    """The sum or the mean of the rows from each offset to the next one."""
    memory = memory_of(table.contiguous())
    places = index.tolist()
    ends = [*offsets.tolist(), len(places)]
    result = torch.zeros(len(offsets), table.shape[1], dtype=table.dtype)
    for bag, (start, end) in enumerate(itertools.pairwise(ends)):
        for place in places[start:end]:
            result[bag] += memory[place * table.shape[1] :][: table.shape[1]]
        if mode == "mean" and end > start:
            result[bag] /= end - start
    return result


BAGS = {
    "table": (pre.Shape("rows", "columns", least=1), pre.Dtype(torch.float32, torch.float64)),
    "index": (pre.Shape("n"), pre.Indices("table")),
    "offsets": (pre.Shape("bags"), pre.Offsets("index", last=False)),
    "mode": pre.OneOf("sum", "mean"),
}


def fake_bags(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    return table.new_empty(offsets.shape[0], table.shape[1])


def bags_without_mean(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    if mode != "sum":
        raise NotImplementedError("only sums are written yet")
    return bags(table, index, offsets)


def bags_of_one_memory(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    """Reads the indices as if they were contiguous."""
    return bags(table, memory_of(index)[: len(index)], offsets, mode)


def bags_without_the_last(
    table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum"
) -> Tensor:
    """Takes a row for the last bag, where that is empty."""
    result = bags(table, index, offsets, mode)
    if len(offsets) and int(offsets[-1]) == len(index):
        result[-1] = table[0]
    return result


enter("bags", bags, BAGS, fake=fake_bags)
enter("bags_without_mean", bags_without_mean, BAGS, "values.declared", fake=fake_bags)
enter("bags_of_one_memory", bags_of_one_memory, BAGS, "memory.gaps", fake=fake_bags)
enter(
    "bags_without_the_last",
    bags_without_the_last,
    BAGS,
    "values.declared",
    reference=bags,
    fake=fake_bags,
)

# --------------------------------------------------------------------------------------------------
# Segments with lengths


def longest(values: Tensor, lengths: Tensor) -> Tensor:
    """The largest value of each segment, and 0 of one that is empty."""
    flat = memory_of(values.contiguous())
    ends = lengths.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    found = [flat[a:b].max() if b > a else flat.new_zeros(()) for a, b in zip(starts, ends)]  # noqa: B905
    return torch.stack(found) if found else values.new_empty(0)


SEGMENTS = {
    "values": pre.Shape("n"),
    "lengths": (pre.Shape("segments", least=1), pre.Lengths("values")),
}


def longest_of_some(values: Tensor, lengths: Tensor) -> Tensor:
    if int(lengths.min()) == 0:
        raise ValueError("an empty segment has no maximum")
    return longest(values, lengths)


def fake_longest(values: Tensor, lengths: Tensor) -> Tensor:
    return values.new_empty(lengths.shape[0])


enter("longest", longest, SEGMENTS, fake=fake_longest)
enter(
    "longest_of_some",
    longest_of_some,
    SEGMENTS,
    "values.declared",
    examples=lambda: [(torch.randn(3), torch.tensor([2, 1]))],
    fake=fake_longest,
)

# --------------------------------------------------------------------------------------------------
# Matrices


def root(matrix: Tensor) -> Tensor:
    return torch.linalg.cholesky(matrix)


def root_of_memory(matrix: Tensor) -> Tensor:
    """Reads rows as if they lay behind each other."""
    return torch.linalg.cholesky_ex(memory_of(matrix)[: matrix.numel()].view(matrix.shape)).L


MATRIX = {
    "matrix": (
        pre.Shape("n", "n"),
        pre.Dtype(torch.float32, torch.float64),
        constraints.positive_definite,
    )
}
enter("root", root, MATRIX)
enter("root_of_memory", root_of_memory, MATRIX, "memory.gaps", fake=root)

# --------------------------------------------------------------------------------------------------
# Sorted values, and indices each of which is there once


def places(edges: Tensor, x: Tensor) -> Tensor:
    """Where values belong between edges; an edge that is out of order would be lost."""
    return torch.from_numpy(np.searchsorted(edges.contiguous().numpy(), x.contiguous().numpy()))


def places_sorted_here(edges: Tensor, x: Tensor) -> Tensor:
    """Writes what it has not declared: the edges become distinct."""
    if len(edges):
        edges[-1] += 1
    return places(edges, x)


EDGES = {
    "edges": (pre.Shape("edges"), pre.Sorted()),
    "x": (pre.Shape("n"), pre.Like("edges", "dtype")),
}


def fake_places(edges: Tensor, x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.long)


enter("places", places, EDGES, fake=fake_places, device_types="cpu")
enter(
    "places_sorted_here",
    places_sorted_here,
    EDGES,
    "contracts.schema",
    fake=fake_places,
    device_types="cpu",
)


def scattered(x: Tensor, index: Tensor) -> Tensor:
    """The inverse of a gather, whose outcome depends on threads if an index is there twice."""
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(int(index.sum())))
    result = x.new_zeros(x.shape[0] + 1)
    result[index[order]] = x[: len(index)][order]
    return result


UNIQUE = {"x": pre.Shape("n"), "index": (pre.Shape("n"), pre.Indices("x"), pre.Unique())}
enter("scattered", scattered, UNIQUE, fake=lambda x, index: x.new_empty(x.shape[0] + 1))

# --------------------------------------------------------------------------------------------------
# Numbers


def entropy(p: Tensor) -> Tensor:
    """Of a coin: NaN outside of what is a probability."""
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))


def checked_entropy(p: Tensor) -> Tensor:
    if p.numel() and not (p.min() >= 0 and p.max() <= 1):
        raise ValueError("a probability is between 0 and 1")
    return entropy(p)


def open_entropy(p: Tensor) -> Tensor:
    if p.numel() and not (p.min() > 0 and p.max() < 1):
        raise ValueError("a probability is between 0 and 1")
    return entropy(p)


def entropy_of_logarithms(p: Tensor) -> Tensor:
    """NaN at both ends, where it should be 0."""
    return -(p * p.log() + (1 - p) * (1 - p).log())


PROBABILITIES = {"p": (pre.Shape("n", "m"), constraints.unit_interval)}
enter("checked_entropy", checked_entropy, PROBABILITIES, fake=torch.empty_like)
enter("open_entropy", open_entropy, PROBABILITIES, "values.declared", fake=torch.empty_like)
enter(
    "entropy_of_logarithms",
    entropy_of_logarithms,
    PROBABILITIES,
    "values.declared",
    reference=entropy,
    fake=torch.empty_like,
)


def only_singles(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"only_singles takes float32, got {x.dtype}")
    return x.contiguous().exp()


SINGLES = {"x": (pre.Shape("n", "m"), pre.Dtype(torch.float32))}
HALVES = {"x": (pre.Shape("n", "m"), pre.Dtype(torch.float32, torch.bfloat16))}
enter("only_singles", only_singles, SINGLES, fake=like)
enter("not_even_halves", only_singles, HALVES, "values.declared", fake=like)

# --------------------------------------------------------------------------------------------------
# Layouts


def doubled_memory(x: Tensor) -> Tensor:
    """What a kernel does that takes the address, and says so."""
    memory = memory_of(x)[: x.numel()]
    return (memory + memory).view(x.shape)


CONTIGUOUS = {"x": (pre.Shape("n", "m"), pre.Contiguous())}
enter("doubled_memory", doubled_memory, CONTIGUOUS, fake=like)
enter("doubled_strides", doubled_memory, {"x": pre.Shape("n", "m")}, "memory.transposed", fake=like)


def paired(x: Tensor, y: Tensor) -> Tensor:
    """Sums of elements, whose number is the same in both, and even."""
    return (x + y).view(-1, 2).sum(1)


EVEN = {
    "x": (pre.Shape("n"), pre.Dtype(torch.float32)),
    "y": (pre.Like("x"), lambda x: len(x) % 2 == 0),
}
enter(
    "paired",
    paired,
    EVEN,
    examples=lambda: [(torch.randn(6), torch.randn(6))],
    fake=lambda x, y: x.new_empty(x.shape[0] // 2),
)
