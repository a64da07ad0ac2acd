"""opcheck's `test_schema` detects undeclared mutations, and results that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop


def check_schema(
    namespace: str, kernel: Callable[..., Any], *args: Any, schema: str = "(Tensor x) -> Tensor"
) -> None:
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema)
    torchop.opcheck(op, args, test_utils="test_schema")


def _adds_a_little(x: Tensor) -> Tensor:
    x.add_(1e-9)
    return x.clone()


def _rotates(x: Tensor) -> Tensor:
    x.copy_(x.roll(1))
    return x.clone()


def _writes_the_other_zero(x: Tensor) -> Tensor:
    x.neg_()
    return x.clone()


@pytest.mark.parametrize(
    ("kernel", "x"),
    [
        (_adds_a_little, torch.zeros(3, dtype=torch.double)),
        (_rotates, torch.arange(4.0)),
        (_writes_the_other_zero, torch.zeros(3)),
    ],
)
def test_mutation_below_the_tolerance_is_detected(
    namespace: str, kernel: Callable[..., Any], x: Tensor
) -> None:
    before = x.clone()
    with pytest.raises(
        torchop.testing.OpCheckError, match="Argument x is not defined as mutable"
    ) as error:
        check_schema(namespace, kernel, x)
    assert f"{namespace}::op" in str(error.value)
    assert torch.equal(x, before)  # opcheck ran the kernel on copies


def test_mutation_in_a_list_is_detected(namespace: str) -> None:
    def kernel(xs: list[Tensor]) -> Tensor:
        xs[1].add_(1e-9)
        return xs[0].clone()

    with pytest.raises(torchop.testing.OpCheckError, match="Argument xs"):
        check_schema(
            namespace,
            kernel,
            [torch.zeros(2), torch.zeros(2, dtype=torch.double)],
            schema="(Tensor[] xs) -> Tensor",
        )


def test_unchanged_nan_is_not_a_mutation(namespace: str) -> None:
    check_schema(namespace, lambda x: x.clone(), torch.tensor([float("nan"), 1.0]))


def test_declared_mutation_is_allowed(namespace: str) -> None:
    def kernel(x: Tensor) -> None:
        x.add_(1)

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=("x",))
    assert torchop.opcheck(op, (torch.zeros(2),), test_utils="test_schema") == {
        "test_schema": "SUCCESS"
    }


def test_memory_shared_through_numpy_is_detected(namespace: str) -> None:
    def kernel(x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(x.detach().numpy())[:2])

    with pytest.raises(torchop.testing.OpCheckError, match="shares memory with input") as error:
        check_schema(namespace, kernel, torch.ones(3))
    assert "output 0" in str(error.value)
    assert "input 'x'" in str(error.value)


def test_result_reused_by_the_next_call_is_detected(namespace: str) -> None:
    kept = torch.ones(3)
    with pytest.raises(torchop.testing.OpCheckError, match="same memory in two calls"):
        check_schema(namespace, lambda x: kept, torch.ones(3))


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(0, 3),
        torch.ones(4, 4).t(),
        torch.arange(10.0)[2:8:2],
        torch.ones(2, 3, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.ones(2, 2).to_sparse(),
        torch.tensor(3),
    ],
    ids=["empty", "transposed", "sliced", "complex", "bool", "sparse", "scalar"],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_correct_kernel_passes_for_all_kinds_of_tensors(namespace: str, x: Tensor) -> None:
    check_schema(namespace, lambda x: x.clone(), x)
