"""Operators that do not check their arguments, but are registered with a predicate `valid`.

The correct operators fail for arguments that `valid` rejects. No check may report this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, raw, right, wrong


def enter(
    name: str,
    function: Callable[..., Any],
    examples: Callable[[], list[Any]],
    valid: Callable[..., bool],
    check: str | None = None,
    reference: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Add an operator with its examples to the zoo. If `check` is given, the operator is faulty."""
    op = define(name, function, **options)
    op.register_examples(examples, valid=valid)
    if check is None:
        right(op, examples)
    else:
        wrong(op, check, examples, reference)


def memory_of(x: Tensor) -> Tensor:
    """Return the memory from the first element to the end of the storage, ignoring strides."""
    return raw(x)[x.storage_offset() :]


# --------------------------------------------------------------------------------------------------
# Sums and means of bags, which are groups of rows of a table


def bags(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    """Return the sum or mean of each bag. `offsets` contains the start of each bag in `index`."""
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


def valid_bags(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> bool:
    if not (table.dim() == 2 and table.numel() and index.dim() == 1 and offsets.dim() == 1):
        return False
    ends = [*offsets.tolist(), len(index)]
    lies_in_table = not len(index) or 0 <= int(index.min()) <= int(index.max()) < len(table)
    return lies_in_table and ends[0] == 0 and ends == sorted(ends) and mode in ("sum", "mean")


def examples_of_bags() -> list[Any]:
    index = torch.tensor([1, 0, 2, 2, 1])
    return [
        (torch.randn(3, 4), index, torch.tensor([0, 1, 1, 4])),
        (torch.randn(3, 4), index, torch.tensor([0, 3, 5]), "mean"),
    ]


def fake_bags(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    return table.new_empty(offsets.shape[0], table.shape[1])


def bags_of_one_memory(table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    """Ignores the strides of `index`, so it reads wrong indices if they are not contiguous."""
    return bags(table, memory_of(index)[: len(index)], offsets, mode)


def bags_without_the_last(
    table: Tensor, index: Tensor, offsets: Tensor, mode: str = "sum"
) -> Tensor:
    """Returns the first row of the table instead of 0 if the last bag is empty."""
    result = bags(table, index, offsets, mode)
    if len(offsets) and int(offsets[-1]) == len(index):
        result[-1] = table[0]
    return result


enter("bags", bags, examples_of_bags, valid_bags, fake=fake_bags)
enter(
    "bags_of_one_memory",
    bags_of_one_memory,
    examples_of_bags,
    valid_bags,
    "memory.gaps",
    fake=fake_bags,
)
enter(
    "bags_without_the_last",
    bags_without_the_last,
    examples_of_bags,
    valid_bags,
    "memory.given",
    reference=bags,
    fake=fake_bags,
)

# --------------------------------------------------------------------------------------------------
# Segments with lengths


def longest(values: Tensor, lengths: Tensor) -> Tensor:
    flat = memory_of(values.contiguous())
    ends = lengths.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    found = [flat[a:b].max() if b > a else flat.new_zeros(()) for a, b in zip(starts, ends)]  # noqa: B905
    return torch.stack(found) if found else values.new_empty(0)


def valid_segments(values: Tensor, lengths: Tensor) -> bool:
    if not (values.dim() == 1 and lengths.dim() == 1 and len(lengths)):
        return False
    return bool((lengths >= 0).all()) and int(lengths.sum()) == len(values)


def fake_longest(values: Tensor, lengths: Tensor) -> Tensor:
    return values.new_empty(lengths.shape[0])


enter(
    "longest",
    longest,
    lambda: [(torch.randn(3), torch.tensor([2, 0, 1]))],
    valid_segments,
    fake=fake_longest,
)

# --------------------------------------------------------------------------------------------------
# Matrices


def root(matrix: Tensor) -> Tensor:
    return torch.linalg.cholesky(matrix)


def root_of_memory(matrix: Tensor) -> Tensor:
    """Ignores the strides of the matrix, so it is incorrect unless the matrix is contiguous."""
    return torch.linalg.cholesky_ex(memory_of(matrix)[: matrix.numel()].view(matrix.shape)).L


def valid_matrix(matrix: Tensor) -> bool:
    is_float = matrix.dtype in (torch.float32, torch.float64)
    if not (is_float and matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]):
        return False
    is_symmetric = torch.allclose(matrix, matrix.mT)
    return is_symmetric and int(torch.linalg.cholesky_ex(matrix).info) == 0


def examples_of_matrices() -> list[Any]:
    return [(torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]]),)]


enter("root", root, examples_of_matrices, valid_matrix)
enter(
    "root_of_memory",
    root_of_memory,
    examples_of_matrices,
    valid_matrix,
    "memory.gaps",
    fake=root,
)

# --------------------------------------------------------------------------------------------------
# Sorted values, and distinct indices


def places(edges: Tensor, x: Tensor) -> Tensor:
    return torch.from_numpy(np.searchsorted(edges.contiguous().numpy(), x.contiguous().numpy()))


def places_sorted_here(edges: Tensor, x: Tensor) -> Tensor:
    """Writes to `edges`, although its schema does not declare this."""
    if len(edges):
        edges[-1] += 1
    return places(edges, x)


def valid_edges(edges: Tensor, x: Tensor) -> bool:
    if not (edges.dim() == x.dim() == 1 and x.dtype is edges.dtype) or x.is_complex():
        return False
    return bool((edges[1:] >= edges[:-1]).all())


def examples_of_edges() -> list[Any]:
    return [(torch.tensor([-1.0, 0.0, 0.5, 2.0]), torch.tensor([0.1, 3.0, -2.0]))]


def fake_places(edges: Tensor, x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.long)


enter("places", places, examples_of_edges, valid_edges, fake=fake_places, device_types="cpu")
enter(
    "places_sorted_here",
    places_sorted_here,
    examples_of_edges,
    valid_edges,
    "contracts.schema",
    fake=fake_places,
    device_types="cpu",
)


def scattered(x: Tensor, index: Tensor) -> Tensor:
    """Scatters in a random order. This is correct unless indices repeat, which `valid` rejects."""
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(int(index.sum())))
    result = x.new_zeros(x.shape[0] + 1)
    result[index[order]] = x[: len(index)][order]
    return result


def valid_scatter(x: Tensor, index: Tensor) -> bool:
    if not (x.dim() == 1 and x.shape == index.shape):
        return False
    distinct = index.unique()
    return len(distinct) == len(index) and bool(((index >= 0) & (index < len(x))).all())


enter(
    "scattered",
    scattered,
    lambda: [(torch.randn(4), torch.tensor([2, 0, 3, 1]))],
    valid_scatter,
    fake=lambda x, index: x.new_empty(x.shape[0] + 1),
)

# --------------------------------------------------------------------------------------------------
# Numbers


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of probabilities. For other numbers, which `valid` rejects, it is NaN."""
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))


def checked_entropy(p: Tensor) -> Tensor:
    if p.numel() and not (p.min() >= 0 and p.max() <= 1):
        raise ValueError("a probability is between 0 and 1")
    return entropy(p)


def entropy_of_logarithms(p: Tensor) -> Tensor:
    """Returns NaN for the probabilities 0 and 1, where the entropy is 0."""
    return -(p * p.log() + (1 - p) * (1 - p).log())


def valid_probabilities(p: Tensor) -> bool:
    return p.dtype.is_floating_point and bool(((p >= 0) & (p <= 1)).all())


def examples_of_probabilities() -> list[Any]:
    return [(torch.tensor([[0.2, 0.25, 0.5], [0.75, 0.9, 0.1]]),)]


enter(
    "checked_entropy",
    checked_entropy,
    examples_of_probabilities,
    valid_probabilities,
    fake=torch.empty_like,
)
enter(
    "entropy_of_logarithms",
    entropy_of_logarithms,
    lambda: [(torch.tensor([[0.0, 0.25, 0.5], [0.75, 1.0, 0.1]]),)],
    valid_probabilities,
    "memory.given",
    reference=entropy,
    fake=torch.empty_like,
)


def only_singles(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"only_singles takes float32, got {x.dtype}")
    return x.contiguous().exp()


enter("only_singles", only_singles, one, lambda x: x.dtype is torch.float32, fake=like)

# --------------------------------------------------------------------------------------------------
# Layouts


def doubled_memory(x: Tensor) -> Tensor:
    memory = memory_of(x)[: x.numel()]
    return (memory + memory).view(x.shape)


enter("doubled_memory", doubled_memory, one, lambda x: x.is_contiguous(), fake=like)
enter(
    "doubled_strides",
    doubled_memory,
    one,
    lambda x: x.dim() == 2,
    "memory.transposed",
    fake=like,
)


def paired(x: Tensor, y: Tensor) -> Tensor:
    """Sum pairs of elements. The tensors must have equal shapes, and an even number of elements."""
    return (x + y).view(-1, 2).sum(1)


def valid_pairs(x: Tensor, y: Tensor) -> bool:
    is_even = x.dim() == 1 and len(x) % 2 == 0
    return is_even and x.shape == y.shape and x.dtype is y.dtype is torch.float32


enter(
    "paired",
    paired,
    lambda: [(torch.randn(6), torch.randn(6))],
    valid_pairs,
    fake=lambda x, y: x.new_empty(x.shape[0] // 2),
)
