"""What a sharding rule allows on one dimension of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

import torchop
from torchop._rules.user.sharding.notation import Sharding, sharding
from torchop._rules.user.sharding.rows import CallTensor, rows


def short(placement: Any) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"


def table(
    rule: Sharding, *shapes: Sequence[int], results: Sequence[Sequence[int]], written: int = -1
) -> list[str]:
    """The rows as text, one tensor for each operand."""
    tensors = [CallTensor(i, shape, i == written) for i, shape in enumerate(shapes)]
    return [
        f"{' '.join(map(short, row.inputs))} -> {' '.join(map(short, row.results))}".strip()
        for row in rows("ns::op", rule, tensors, results)
    ]


def test_the_helper_shows_placements() -> None:
    assert list(map(short, (Shard(1), Replicate(), Partial("max")))) == ["S1", "R", "P(max)"]


def test_a_name_is_sharded_everywhere_at_once() -> None:
    matmul = sharding("b k, k n -> b n")
    assert table(matmul, (4, 8), (8, 6), results=[(4, 6)]) == [
        "R R -> R",
        "S0 R -> S0",
        "R S1 -> S1",
    ]


def test_what_a_result_lacks_is_whole_unless_it_is_reduced() -> None:
    matmul = sharding("b k, k n -> b n", reduce={"k": "sum"})
    assert "S1 S0 -> P(sum)" in table(matmul, (4, 8), (8, 6), results=[(4, 6)])
    two = sharding("b k -> b k, b", reduce={"k": "max"})
    assert table(two, (4, 8), results=[(4, 8), (4,)]) == [
        "R -> R R",
        "S0 -> S0 S0",
        "S1 -> S1 P(max)",
    ]
    assert table(sharding("b k -> b k, b"), (4, 8), results=[(4, 8), (4,)]) == [
        "R -> R R",
        "S0 -> S0 S0",
    ]


def test_whole_and_unnamed_dimensions_are_never_sharded() -> None:
    softmax = sharding("... d -> ... d", whole="d")
    assert table(softmax, (2, 4, 8), results=[(2, 4, 8)]) == ["R -> R", "S0 -> S0", "S1 -> S1"]
    assert table(sharding("a . -> . a"), (4, 8), results=[(8, 4)]) == ["R -> R", "S0 -> S1"]
    assert table(sharding("... -> ...", whole="..."), (4,), results=[(7,)]) == ["R -> R"]


def test_dots_broadcast_from_the_right() -> None:
    add = sharding("..., ... -> ...")
    assert table(add, (2, 4, 8), (8,), results=[(2, 4, 8)]) == [
        "R R -> R",
        "S0 R -> S0",
        "S1 R -> S1",
        "S2 S0 -> S2",
    ]
    assert table(add, (4, 1), (1, 8), results=[(4, 8)]) == ["R R -> R", "S0 R -> S0", "R S1 -> S1"]


def test_a_sum_over_all_dimensions() -> None:
    total = sharding("... -> ", reduce={"...": "sum"})
    total.results = sharding(" -> ,").results[:1]
    assert table(total, (4, 8), results=[()]) == ["R -> R", "S0 -> P(sum)", "S1 -> P(sum)"]


def test_a_pending_sum_passes_through_linear_arguments() -> None:
    product = sharding(". , . -> .", linear=(0, 1))
    assert table(product, (4,), (4,), results=[(4,)]) == [
        "R R -> R",
        "P(sum) R -> P(sum)",
        "P(avg) R -> P(avg)",
        "R P(sum) -> P(sum)",
        "R P(avg) -> P(avg)",
    ]
    addition = sharding(". , . -> .", linear=((0, 1),))
    assert table(addition, (4,), (4,), results=[(4,)])[1:] == [
        "P(sum) P(sum) -> P(sum)",
        "P(avg) P(avg) -> P(avg)",
    ]


def test_what_is_written_counts_as_a_result() -> None:
    accumulate = sharding("b n, b k, k n -> ")
    assert table(accumulate, (4, 6), (4, 8), (8, 6), results=[], written=0) == [
        "R R R ->",
        "S0 S0 R ->",
        "S1 R S1 ->",
    ]


def test_absent_tensors_and_lists() -> None:
    rule = sharding("[b d], d -> b d")
    two = [CallTensor(0, (4, 8)), CallTensor(0, (4, 8))]
    placed = [[short(p) for p in row.inputs] for row in rows("ns::op", rule, two, [(4, 8)])]
    assert placed == [["R", "R"], ["S0", "S0"], ["S1", "S1"]]
    chunks = sharding("... -> [...]")
    assert table(chunks, (4,), results=[(4,), (4,), (4,)])[1] == "S0 -> S0 S0 S0"


WRONG: dict[str, tuple[str, dict[str, Any], list[Any], list[Any], str]] = {
    "dimensions": ("a b -> a b", {}, [(4,)], [(4,)], r"'a b' of .* argument 0, which has 1 dim"),
    "as einsum has it": ("ab -> ab", {}, [(4, 2)], [(4, 2)], "by spaces: is 'a b' meant"),
    "result": ("a -> a", {}, [(4,)], [(4, 1)], "does not fit result 0, which has 2 dimensions"),
    "results": ("a -> a", {}, [(4,)], [(4,), (4,)], "has 1 operands after .* returned 2"),
    "doubled": ("a -> a", {}, [(4,)], [(8,)], "result 0 of shape .8. has 8, others have 4"),
    "reduced": ("a -> a", {}, [(4,)], [(1,)], "result 0 of shape .1. has 1, others have 4"),
    "inputs": ("a, a -> a", {}, [(4,), (5,)], [(4,)], "'a', for dimensions of different size"),
    "dots": ("... -> ...", {}, [(4, 6)], [(4,)], r"'\.\.\.', for dimensions of different size"),
}


@pytest.mark.parametrize(
    ("text", "options", "shapes", "results", "message"), WRONG.values(), ids=WRONG
)
def test_shapes_that_contradict_a_rule_are_refused(
    text: str, options: dict[str, Any], shapes: list[Any], results: list[Any], message: str
) -> None:
    with pytest.raises(torchop.ShardingError, match=f"^ns::op: .*{message}"):
        table(sharding(text, **options), *shapes, results=results)


def test_what_is_written_is_not_broadcast() -> None:
    with pytest.raises(
        torchop.ShardingError, match=r"argument 0 of shape .1. has 1, others have 4"
    ):
        table(sharding("..., ... ->"), (1,), (4,), results=[], written=0)
