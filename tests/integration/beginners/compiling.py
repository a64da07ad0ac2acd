"""Mistakes that raise only under a compiler, export or opcheck. Most are in fake kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchop
from tests.integration.beginners.defining import nothing_but_an_effect
from tests.integration.beginners.mistake import compiled, mistake, scale_of


class Calls(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Any:
        return self.op(x)


@mistake(RuntimeError, cause="There was no fake impl registered", fix="return torch.empty_like(x)")
def compiling_without_a_fake_kernel(n: str) -> None:
    compiled(scale_of(n), torch.ones(1))


@mistake(
    RuntimeError, cause="There was no fake impl registered", fix="@torchop.register_fake('{n}::"
)
def exporting_without_a_fake_kernel(n: str) -> None:
    torch.export.export(Calls(scale_of(n)), (torch.ones(1),))


@mistake(RuntimeError, cause="the fake kernel read the data", fix="shapes, dtypes and devices only")
def fake_kernel_in_numpy(n: str) -> None:
    scale = scale_of(n)
    scale.register_fake(lambda x, factor: torch.from_numpy(x.numpy() * factor))
    compiled(scale, torch.ones(1))


@mistake(RuntimeError, cause="the fake kernel read the data", fix="new_dynamic_size()")
def exporting_a_size_that_depends_on_data(n: str) -> None:
    @torchop.custom_op(f"{n}::positive", mutates_args=())
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    positive.register_fake(lambda x: x.new_empty(len(x[x > 0].tolist())))
    torch.export.export(Calls(positive), (torch.ones(3),))


def checked_fake(n: str, fake: Callable[..., Any], x: Tensor) -> None:
    scale = scale_of(n)
    scale.register_fake(fake)
    torchop.opcheck(scale, (x,), test_utils="test_faketensor")


@mistake(
    torchop.testing.OpCheckError,
    cause="Shapes torch.Size([2, 3]) and torch.Size([3])",
    fix="The kernel returned the first",
)
def fake_kernel_of_another_shape(n: str) -> None:
    checked_fake(n, lambda x, factor: x.new_empty(3), torch.ones(2, 3))


@mistake(
    torchop.testing.OpCheckError,
    cause="torch.float32 and torch.float64",
    fix="Make the fake kernel return the same",
)
def fake_kernel_of_another_dtype(n: str) -> None:
    checked_fake(n, lambda x, factor: torch.empty_like(x, dtype=torch.double), torch.ones(2))


@mistake(
    torchop.testing.OpCheckError,
    cause="Strides are (1, 3) and (2, 1)",
    fix="Make the fake kernel return the same",
)
def fake_kernel_of_other_strides(n: str) -> None:
    checked_fake(n, lambda x, factor: x.new_empty(x.shape), torch.ones(2, 3).t())


@mistake(
    torchop.testing.OpCheckError,
    cause="different in eager-mode",
    fix="use PyTorch's generators",
)
def random_numbers_of_numpy(n: str) -> None:
    @torchop.custom_op(f"{n}::noise", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return x + float(np.random.rand())

    noise.register_fake(torch.empty_like)
    torchop.opcheck(noise, (torch.ones(2),), test_utils="test_aot_dispatch_dynamic")


@mistake(RuntimeError, cause="returns nothing and mutates nothing", fix='effects="ordered"')
def compiling_an_effect(n: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nothing_but_an_effect(n)
    compiled(getattr(torch.ops, n).f, torch.ones(1))
