"""Compiled programs reject results of another dtype than the fake kernel returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchop


def define(namespace: str, result: str) -> tuple[Any, list[torch.dtype]]:
    dtypes = [torch.float32]

    def results(x: Tensor, dtype: torch.dtype) -> Any:
        ones = torch.ones(x.shape, dtype=dtype)
        return {"Tensor": ones, "Tensor[]": [x + 1, ones], "(Tensor, Tensor)": (x + 1, ones)}[
            result
        ]

    op = torchop.custom_op(
        f"{namespace}::ones",
        lambda x: results(x, dtypes[0]),
        schema=f"(Tensor x) -> {result}",
        mutates_args=(),
    )
    op.register_fake(lambda x: results(x, torch.float32))
    return op, dtypes


def doubled(results: Any) -> Tensor:
    return (results if isinstance(results, Tensor) else results[1]) * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("result", ["Tensor", "Tensor[]", "(Tensor, Tensor)"])
def test_result_of_another_dtype_is_rejected(
    namespace: str, result: str, dtype: torch.dtype
) -> None:
    op, dtypes = define(namespace, result)
    function = torch.compile(lambda x: doubled(op(x)), fullgraph=True)
    assert function(torch.zeros(4)).tolist() == [2.0] * 4
    dtypes[0] = dtype
    expected = (
        f"{namespace}::ones: the kernel returned a tensor with another dtype.* than the fake "
        "kernel, which returned torch.float32 on cpu"
    )
    with pytest.raises(RuntimeError, match=expected):
        function(torch.zeros(4))
