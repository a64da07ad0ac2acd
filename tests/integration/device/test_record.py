"""Recording does not change calls on a device."""

from __future__ import annotations

import torch
from torch import Tensor

import torchop
from tests.integration.device.target import SECOND, TYPE


def test_a_recorded_call_under_autocast(namespace):
    @torchop.custom_op(f"{namespace}::product", mutates_args=())
    def product(x: Tensor) -> Tensor:
        # Autocast is off inside the kernel because of `register_autocast`, so this product is in
        # float32.
        return x.float() @ x.float()

    product.register_autocast(TYPE, torch.bfloat16)
    x = torch.ones(2, 2, device=SECOND)
    with torch.autocast(TYPE, torch.bfloat16):
        expected = product(x)
        with torchop.record(f"{namespace}::*") as calls:
            result = product(x)
    assert expected.dtype is torch.float32
    assert result.dtype is expected.dtype
    assert list(calls) == [f"{namespace}::product"]
