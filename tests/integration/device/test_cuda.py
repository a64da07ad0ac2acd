"""Tests that need a GPU: CUDA graphs, Inductor, packages, Triton and memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests.integration.device import target
from tests.integration.device.test_streams import product
from torchop.testing import check

pytestmark = [needs_native, *target.needs_cuda]


def ones(**options: Any) -> Tensor:
    return torch.ones(4, device="cuda", **options)


def with_fake(namespace: str, **options: Any) -> Any:
    op = product(namespace, **options)
    op.register_fake(lambda x, y: torch.empty_like(x * y))
    return op


def test_a_captured_call_is_native_and_replays(namespace: str) -> None:
    op, x, y = product(namespace), ones(), ones() * 3
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with counting(op) as calls, torch.cuda.graph(graph):
        result = op(x, y)
    x.fill_(5)
    graph.replay()
    assert result.tolist() == [15.0] * 4
    assert calls == {"native": 1}


# PyTorch warns, because `make_graphed_callables` keeps the autograd graph of its last warm-up call
# alive.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("derived", [False, True])
def test_a_captured_training_step_replays(namespace: str, derived: bool) -> None:
    op = product(namespace, derived=derived)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(ones() * 2)

        def forward(self, x: Tensor) -> Tensor:
            return op(x, self.weight).sum()

    module = Module()
    step = torch.cuda.make_graphed_callables(module, (ones(),))
    for number in (1.0, 3.0):
        module.weight.grad = None
        step(ones() * number).backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [number] * 4


# PyTorch warns, because Inductor captures an empty graph to create its memory pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("derived", [False, True])
def test_reduce_overhead_captures_the_operator(namespace: str, derived: bool) -> None:
    # Import this here, because the import loads Dynamo, which only this test needs.
    from torch._dynamo.utils import counters

    op = with_fake(namespace, derived=derived)
    counters.clear()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (op(x * 2, y) + 1).sum()

    for _ in range(4):
        x = (ones() * 3).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        loss(x, ones() * 5).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [10.0] * 4
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_peak_memory_is_at_most_stocks(namespace: str) -> None:
    ours, stock = product(f"{namespace}_ours"), product(f"{namespace}_stock", library=torch.library)
    assert _peak(ours) <= _peak(stock)


def _peak(op: Any) -> int:
    x = torch.ones(1 << 22, device="cuda", requires_grad=True)
    op(x, x).sum().backward()
    x.grad = None
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = x
    for _ in range(8):
        y = op(y, x)
    y.sum().backward()
    return torch.cuda.max_memory_allocated() - before


def test_inductor_compiles_the_operator_into_a_program(namespace: str) -> None:
    op = with_fake(namespace)
    x = ones(requires_grad=True)
    torch.compile(lambda x: (op(x, x).sin() * 2).sum(), fullgraph=True)(x).backward()
    y = ones(requires_grad=True)
    ((y * y).sin() * 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_package_of_aotinductor_runs_it(namespace: str, tmp_path: Path) -> None:
    op = with_fake(namespace)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, x) + 1

    program = torch.export.export(Module(), (ones(),))
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "program.pt2")
    )
    assert torch._inductor.aoti_load_package(path)(ones() * 3).tolist() == [10.0] * 4


def test_the_profiler_names_the_operator(namespace: str) -> None:
    op, x = product(namespace), ones()
    op(x, x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        op(x, x)
        torch.cuda.synchronize()
    assert f"{namespace}::product" in {event.key for event in profile.key_averages()}


def test_every_check_passes_on_the_gpu(namespace: str) -> None:
    op = with_fake(namespace)
    op.register_vmap("sequential")
    x = torch.randn(3, 4, device="cuda")
    report = check(op, (x, x.clone()), raise_exception=False, budget=60)
    assert {each.check: each.message for each in report.failures} == {}


def test_triton_kernel_is_launched_on_the_device_of_its_tensors(namespace: str) -> None:
    triton = pytest.importorskip("triton")
    op = torchop.custom_op(
        f"{namespace}::add_one",
        lambda x: _add_one(triton, x),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        device_types="cuda",
    )
    for number in range(torch.cuda.device_count()):
        x = torch.randn(5000, device=f"cuda:{number}")
        assert torch.equal(op(x), x + 1)


def _add_one(triton: Any, x: Tensor) -> Tensor:
    from tests.integration.device.triton_kernels import (
        add_one,
    )

    result = torch.empty_like(x)
    with torch.accelerator.device_index(x.device.index):  # Triton uses the current device
        add_one[(triton.cdiv(x.numel(), 1024),)](x, result, x.numel(), BLOCK=1024)
    return result
