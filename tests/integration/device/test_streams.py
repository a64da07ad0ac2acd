"""A call neither waits for the device nor takes memory, unless its kernel does.

Uses private names.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests.integration.device import target
from tests.integration.device.target import SECOND, TYPE
from torchop.testing._timing import Way, timed

pytestmark = [needs_native, target.needs_accelerator]
# On a GPU, the tensors are so large that the work on another stream is still running when a test
# reads the result. So a missing synchronization is detected.
SIDE = 2048 if TYPE == "cuda" else 16


def product(namespace: str, *, derived: bool = False, library: Any = torchop) -> Any:
    op = library.custom_op(
        f"{namespace}::product",
        lambda x, y: x * y,
        mutates_args=(),
        schema="(Tensor x, Tensor y) -> Tensor",
    )
    if derived:
        op.derive_autograd()
        return op

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    op.register_autograd(backward, setup_context=setup_context)
    return op


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_a_training_step_waits_for_nothing(namespace: str, derived: bool, native: bool) -> None:
    op = product(namespace, derived=derived)
    x = torch.ones(4, device=SECOND, requires_grad=True)

    def step() -> None:
        op(x, x).sum().backward()
        op(x.detach(), x.detach())

    for _ in range(2):
        step()
    way = torch.enable_grad() if native else torchop.native.disabled()
    with way, target.host_waits() as waits:
        step()
    assert waits == []


def test_an_explanation_and_a_recording_wait_for_nothing(namespace: str) -> None:
    op = product(namespace)
    x = torch.ones(4, device=SECOND)
    torchop.explain(op, x, x)
    with target.host_waits() as waits:
        assert torchop.explain(op, x, x).native
        with torchop.record(f"{namespace}::*"):
            op(x, x)
    assert waits == []


def test_gradients_of_a_forward_on_another_stream(namespace: str) -> None:
    op = product(namespace)
    base = torch.accelerator.current_stream()
    for _ in range(10):
        x = torch.full((1 << 12,), 2.0, device=TYPE, requires_grad=True)
        busy = torch.ones(SIDE, SIDE, device=TYPE)
        side = torch.Stream(TYPE)
        side.wait_stream(base)
        torch.accelerator.set_stream(side)
        try:
            for _ in range(5):
                busy = busy @ busy * 1e-4
            y = op(x * 1.5, x)
        finally:
            torch.accelerator.set_stream(base)
        base.wait_stream(side)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.cpu().unique().tolist() == [6.0]


@pytest.mark.parametrize("library", [torchop, torch.library])
def test_backward_runs_on_the_stream_of_the_forward(namespace: str, library: Any) -> None:
    streams = []
    op = library.custom_op(
        f"{namespace}::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        streams.append(torch.accelerator.current_stream())
        return grad * 2

    op.register_autograd(backward)
    base = torch.accelerator.current_stream()
    side = torch.Stream(TYPE)
    side.wait_stream(base)
    for _ in range(3):
        x = torch.ones(4, device=TYPE, requires_grad=True)
        torch.accelerator.set_stream(side)
        try:
            y = op(x)
        finally:
            torch.accelerator.set_stream(base)
        y.sum().backward()
    assert streams == [side] * 3


@target.only_on_the_standin
@pytest.mark.parametrize("on_device", [False, True])
def test_calls_are_timed_on_the_device_of_their_tensors(on_device: bool) -> None:
    x = torch.ones(4, device=SECOND)
    with target.trace() as lines:
        timed({"call": Way(lambda: lambda: x + 1)}, ([x], {}), 1e-9, on_device=on_device)
    assert "host waits: synchronize device 1" in lines
    assert ("record an event on 1.0" in lines) is on_device


def test_training_leaves_no_memory_behind(namespace: str) -> None:
    op = product(namespace)
    x = torch.ones(1 << 10, device=TYPE, requires_grad=True)

    def used(steps: int) -> int:
        for _ in range(steps):
            x.grad = None
            op(op(x, x), x).sum().backward()
        x.grad = None
        gc.collect()
        torch.accelerator.synchronize()
        return target.module().memory_allocated()

    with counting(op) as calls:
        before = used(5)
        assert used(50) <= before
    assert calls["native"] > 90
