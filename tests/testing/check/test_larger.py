"""Checks of larger inputs: what is asked of more dimensions, and of which operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import Result
from torchop.testing._check.run import plan_checks, run_check


def many_dims(namespace: str, function: Callable[..., Any], *args: Any) -> Result:
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    (check,) = plan_checks(op, [args], only="memory.many_dims")
    return run_check(check)


def test_a_batch_is_asked_up_to_six_dimensions(namespace: str) -> None:
    asked = []

    def double(x: Tensor) -> Tensor:
        asked.append(x.dim())
        return x * 2

    assert many_dims(namespace, double, torch.arange(6.0).view(2, 3)).outcome == "passed"
    assert {3, 4, 5, 6} <= set(asked)
    assert max(asked) == 6


def test_images_are_asked_about_a_video_only_if_one_image_is_done_alike(namespace: str) -> None:
    def over_channels(x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    result = many_dims(namespace, over_channels, torch.arange(24.0).view(1, 2, 3, 4).sin())
    assert result.outcome == "cannot be done"
    assert "leading dimension" in result.message


@pytest.mark.parametrize("batched", ["both", "first"])
def test_a_batch_may_be_of_one_argument(namespace: str, batched: str) -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        if batched == "first" and y.dim() > 2:
            raise ValueError("one matrix for all")
        return (x[:1].expand(x.shape) if x.dim() > 4 else x) @ y

    result = many_dims(namespace, product, torch.randn(2, 3), torch.randn(3, 4))
    assert result.outcome == "failed"
    assert "of a batch of 5 dimensions" in result.message
