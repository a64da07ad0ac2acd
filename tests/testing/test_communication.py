"""communication: the collectives of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

import torchop
from torchop.testing import Collective, communication

A, B = torch.ones(4, 8), torch.ones(8, 4)


@pytest.fixture
def matmul(namespace: str) -> Any:
    op = torchop.custom_op(
        f"{namespace}::mm", torch.mm, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
    )
    op.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    op.register_sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))
    return op


def test_a_call_that_needs_none(matmul: Any) -> None:
    assert communication(matmul, A, B) == []
    assert communication(matmul, A, B, placements=[Shard(1), Shard(0)]) == []
    assert communication(matmul, A, B, placements=[Partial(), Replicate()]) == []
    both = [[Shard(0), Shard(1)], [Replicate(), Shard(0)]]
    assert communication(matmul, A, B, mesh=(2, 2), placements=both) == []


def test_collectives_and_their_bytes(matmul: Any) -> None:
    def gathered(a: Any, b: Any) -> Any:
        return matmul(a, b).full_tensor()

    sums = communication(gathered, A, B, placements=[Shard(1), Shard(0)])
    assert sums == [Collective("all_reduce", 4 * 4 * 4)]
    rows = communication(gathered, A, B, placements=[Shard(0), Replicate()])
    assert rows == [Collective("all_gather", 4 * 4 * 4)]
    uneven = communication(gathered, torch.ones(3, 8), B, placements=[Shard(0), Replicate()])
    assert uneven == [Collective("all_gather", 4 * 4 * 4)], "padded"


def test_without_the_right_rule_there_is_an_all_gather(matmul: Any) -> None:
    matmul.register_sharding("replicate")
    collectives = communication(matmul, A, B, placements=[Shard(1), Shard(0)])
    assert [each.name for each in collectives] == ["all_gather", "all_gather"]
    assert collectives[0].bytes == 4 * 8 * 4


def test_backward_and_keywords(namespace: str) -> None:
    def step(x: Tensor, *, w: Tensor) -> None:
        (x * w).sum().backward()
        w.grad.full_tensor()  # type: ignore[union-attr]

    w = torch.ones(8, requires_grad=True)
    names = [each.name for each in communication(step, A, w=w, placements=[Shard(0), Replicate()])]
    assert names.count("all_reduce") >= 1


def test_as_many_placements_as_tensors(matmul: Any) -> None:
    with pytest.raises(
        ValueError, match="there are 2 tensors among the arguments, and 1 placements"
    ):
        communication(matmul, A, B, placements=[Shard(0)])
