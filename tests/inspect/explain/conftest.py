from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop


@pytest.fixture
def op(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int = 1) -> Tensor:
        return x + n

    op.register_fake(lambda x, n=1: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad, None))
    return op


@pytest.fixture
def write(namespace):
    return torchop.custom_op(
        f"{namespace}::op", lambda x: None, mutates_args={"x"}, schema="(Tensor(a!) x) -> ()"
    )
