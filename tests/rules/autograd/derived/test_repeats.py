"""A body that computes something else when it runs again has no derived gradient."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from torchop import GradientError

GENERATOR = torch.Generator()
DRAWS = np.random.default_rng(0)
COUNTER = [0.0]


def count() -> float:
    COUNTER[0] += 1
    return COUNTER[0]


CHANGING: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x * torch.from_numpy(np.random.rand(*x.shape)),
    "a generator of numpy": lambda x: x * torch.from_numpy(DRAWS.random(x.shape)),
    "random": lambda x: x * random.random(),
    "urandom": lambda x: x * int.from_bytes(os.urandom(4), "big"),
    "a generator of PyTorch": lambda x: x * torch.rand(x.shape, generator=GENERATOR),
    "the time": lambda x: x * float(time.perf_counter_ns() % 100_003),
    "a counter": lambda x: x * count(),
}


def derived(name: str, body: Callable[[Tensor], Any], schema: str) -> Any:
    op = torchop.custom_op(name, body, mutates_args=(), schema=schema)
    op.register_fake(lambda x: torch.empty_like(x))
    op.derive_autograd()
    return op


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("body", CHANGING.values(), ids=CHANGING)
def test_a_body_that_does_not_repeat_raises(
    namespace: str, body: Callable[[Tensor], Any], backend: str | None
) -> None:
    op = derived(f"{namespace}::op", body, "(Tensor x) -> Tensor")
    call = op if backend is None else torch.compile(op, backend=backend, fullgraph=True)
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = call(x)
    with pytest.raises(GradientError, match=f"^{namespace}::op: the derived formula runs the body"):
        y.sum().backward()


def test_every_output_is_compared(namespace: str) -> None:
    schema = "(Tensor x) -> (Tensor, Tensor)"
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: (x * 2, x * count()), mutates_args=(), schema=schema
    )
    op.derive_autograd()
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(GradientError, match="output 1 has other values"):
        op(x)[0].sum().backward()


def test_a_body_that_draws_for_some_arguments_raises_for_these(namespace: str) -> None:
    def drop(x: Tensor, training: bool) -> Tensor:
        return x * torch.from_numpy(np.random.rand(*x.shape)) if training else x * 2

    op = torchop.custom_op(f"{namespace}::drop", drop, mutates_args=())
    op.derive_autograd()
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for _ in range(4):
        (grad,) = torch.autograd.grad(op(x, False).sum(), x)
        assert grad.tolist() == [2, 2, 2]
    with pytest.raises(GradientError, match=r"the body draws numbers from numpy\.random"):
        op(x, True).sum().backward()


def test_random_numbers_of_pytorch_repeat(namespace: str) -> None:
    op = derived(f"{namespace}::op", lambda x: x * torch.rand_like(x), "(Tensor x) -> Tensor")
    x = torch.ones(4, requires_grad=True)
    for _ in range(5):
        y = op(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, y.detach())


def test_only_the_first_backwards_run_the_body_again(namespace: str) -> None:
    runs = []

    def body(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    op = derived(f"{namespace}::op", body, "(Tensor x) -> Tensor")
    x = torch.ones(4, requires_grad=True)
    numbers = []
    for _ in range(6):
        before = len(runs)
        op(x).sum().backward()
        numbers.append(len(runs) - before)
    assert numbers == [3, 3, 3, 2, 2, 2]


def test_results_that_are_not_finite_are_compared_too(namespace: str) -> None:
    op = derived(f"{namespace}::op", lambda x: x / 0, "(Tensor x) -> Tensor")
    x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None


def test_a_body_in_inference_mode_raises(namespace: str) -> None:
    body = torch.inference_mode()(torch.sin)
    op = derived(f"{namespace}::op", body, "(Tensor x) -> Tensor")
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(GradientError, match=f"^{namespace}::op: .*the body left autograd"):
        op(x).sum().backward()
