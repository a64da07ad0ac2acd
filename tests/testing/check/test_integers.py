"""Integers that are large, negative, or neither because a call would take too long."""

from __future__ import annotations

import torch
from torch import Tensor

import torchop
from torchop.testing import check


def test_integers_that_cost_time_or_are_places_are_left_alone(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::rows_of", mutates_args=())
    def rows_of(table: Tensor, index: Tensor, rounds: int) -> Tensor:
        assert rounds < 2**30, "which would take minutes"
        for _ in range(rounds):
            table = table + 1
        return table[index]  # which raises where an index is no place

    example = (torch.zeros(4, 2), torch.tensor([3, 1, 2]), 20)
    (result,) = check(rows_of, example, only="values.int32").results
    assert result.outcome == "cannot be done"
    assert "no argument is an integer that may be large" in result.message


def test_a_permutation_and_lengths_are_left_alone(namespace: str) -> None:
    def inverted(order: Tensor) -> Tensor:
        assert order.max() < len(order), "which a kernel without checks would write to"
        return torch.zeros_like(order).index_copy_(0, order, torch.arange(len(order)))

    def ranges(lengths: Tensor) -> Tensor:
        assert lengths.sum() < 2**20, "which would take minutes"
        return torch.cat([torch.arange(n) for n in lengths.tolist()])

    for name, kernel, values in (("inverted", inverted, [2, 0, 1]), ("ranges", ranges, [2, 1, 3])):
        op = torchop.custom_op(f"{namespace}::{name}", kernel, mutates_args=())
        (result,) = check(op, (torch.tensor(values),), only="values.int32").results
        assert result.outcome == "cannot be done"


def test_the_argument_and_the_fault_are_named(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::packed", mutates_args=())
    def packed(x: Tensor, dim: int, seed: int) -> Tensor:
        return (x + torch.tensor(seed).int()).cumsum(dim if dim > 0 else 0)

    example = (torch.ones(2, 3), 1, 7)
    report = check(packed, example, only=("int32", "negative_dim"), raise_exception=False)
    wide, negative = report.failures
    assert "the argument seed: integers that are 2**32 apart give the same result" in wide.message
    assert "dim=-1 in place of 1" in negative.message
    assert "'dim': 1" in negative.program
    assert "negative=-1" in negative.program
