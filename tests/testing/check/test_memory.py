"""Checks of memory, whatever was in that memory before."""

from __future__ import annotations

import torch
from torch import Tensor

import torchop
from torchop.testing import check


def test_an_element_that_is_not_written_is_found_where_memory_held_nan(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::leaves_last", mutates_args=())
    def leaves_last(x: Tensor) -> Tensor:
        result = torch.empty(x.shape)
        result.view(-1)[:-1] = x.reshape(-1)[:-1]
        return result

    outcomes = set()
    for length in range(1, 200, 30):
        freed = [torch.full((length,), float("nan")) for _ in range(100)]
        del freed
        report = check(
            leaves_last,
            (torch.ones(length),),
            only=["memory.uninitialized"],
            raise_exception=False,
        )
        outcomes.update(result.outcome for result in report.results)
    assert outcomes == {"failed"}
