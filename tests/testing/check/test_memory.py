"""Checks of memory, whatever was in that memory before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import check
from torchop.testing._check.memory import writes_every_element


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


def test_an_element_is_found_that_several_calls_in_a_row_find_as_nan(namespace: str) -> None:
    calls = []

    @torchop.custom_op(f"{namespace}::leaves_last", mutates_args=())
    def leaves_last(x: Tensor) -> Tensor:
        calls.append(x)
        result = x.clone()
        result[-1] = float(len(calls)) if len(calls) % 6 == 0 else float("nan")
        return result

    with pytest.raises(AssertionError, match=r"torch\.empty filled with NaN: result 0"):
        writes_every_element(leaves_last._opoverload, (torch.ones(3),), {})
    assert len(calls) == 6


def test_nan_that_the_operator_writes_is_no_sign(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::log", mutates_args=())
    def log(x: Tensor) -> Tensor:
        return x.log()

    writes_every_element(log._opoverload, (torch.tensor([-1.0, 1.0]),), {})


def test_numbers_are_not_blamed_for_a_layout(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::takes_address", mutates_args=())
    def takes_address(x: Tensor) -> Tensor:
        return torch.empty(0).set_(x.untyped_storage())[: x.numel()].view(x.shape).clone()

    only = ["memory.sliced", "values.nan", "values.zeros"]
    report = check(takes_address, (torch.ones(2, 3),), only=only, raise_exception=False)
    assert [failure.check for failure in report.failures] == ["memory.sliced"]
    assert report.count("passed") == 2
    strides = []

    @torchop.custom_op(f"{namespace}::takes_contiguous", mutates_args=())
    def takes_contiguous(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return x.clone()

    takes_contiguous.register_examples(
        lambda: [(torch.ones(2, 3),)], valid=lambda x: x.is_contiguous()
    )
    assert check(takes_contiguous, only=only).count("passed") == 2
    assert set(strides) == {(3, 1)}
