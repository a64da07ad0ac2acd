"""Measure how long calls take on an accelerator, or on the CPU if there is none.

Each column is a different way to call the same function:

- plain function: the Python function itself.
- torchop handle, torchop torch.ops: an operator of torchop.
- custom_op: an operator of `torch.library.custom_op`.
- accelerated: an operator of `torch.library.custom_op` after `torchop.accelerate`.
- define + impl: an operator of `torch.library.define` and `torch.library.impl`.

The row "CPU" is the CPU time of the calling thread. It does not include the time of the thread that
runs the backward. The row "elapsed" is the time until the device has finished.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import harness
import torchop
from harness import Benchmark, Settings, Tables

WARM_UP = 20
TENSORS = 14
MANY = f"({', '.join(f'Tensor x{number}' for number in range(TENSORS))}) -> Tensor"
ONE = "(Tensor x) -> Tensor"
PLAIN, HANDLE = "plain function", "torchop handle"
CPU, ELAPSED = "CPU", "elapsed"
TITLES = EMPTY, COPY, FORWARD, BACKWARD, DERIVED = (
    "14 tensors, no launch",
    "14 tensors, one launch",
    "saves a tensor, forward",
    "saves a tensor, forward and backward",
    "derived formula, forward",
)

Function = Callable[..., Tensor]


def device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def variants(
    name: str, body: Function, schema: str, formula: tuple[Any, Any] | None = None
) -> dict[str, Function]:
    ours = torchop.custom_op(f"bench::{name}", body, mutates_args=(), schema=schema)
    stock = torch.library.custom_op(f"bench_stock::{name}", body, mutates_args=(), schema=schema)
    fast = torch.library.custom_op(f"bench_fast::{name}", body, mutates_args=(), schema=schema)
    torch.library.define(f"bench_low::{name}", schema)
    key = torch._C._dispatch_key_for_device(device().type)
    torch.library.impl(f"bench_low::{name}", key)(body)
    if formula is not None:
        backward, setup_context = formula
        for op in (ours, stock, fast):
            op.register_autograd(backward, setup_context=setup_context)
        torch.library.register_autograd(f"bench_low::{name}", backward, setup_context=setup_context)
    torchop.accelerate(f"bench_fast::{name}")
    return {
        PLAIN: body,
        HANDLE: ours,
        "torchop torch.ops": getattr(torch.ops.bench, name).default,
        "custom_op": stock,
        "custom_op, accelerated": fast,
        "define + impl": getattr(torch.ops.bench_low, name).default,
    }


def time_calls(
    calls: Mapping[str, Callable[[], object]], rounds: int, times: int
) -> dict[str, dict[str, float]]:
    """Return the CPU time and the elapsed time of one call, in microseconds."""
    wait = (lambda: None) if device().type == "cpu" else torch.accelerator.synchronize
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    busy: dict[str, list[float]] = {name: [] for name in calls}
    elapsed: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            started, cpu = time.perf_counter(), time.thread_time()
            for _ in range(times):
                call()
            busy[name].append((time.thread_time() - cpu) / times * 1e6)
            wait()
            elapsed[name].append((time.perf_counter() - started) / times * 1e6)
    return {
        CPU: {name: statistics.median(values) for name, values in busy.items()},
        ELAPSED: {name: statistics.median(values) for name, values in elapsed.items()},
    }


def cases() -> dict[str, dict[str, Callable[[], object]]]:
    where = device()
    tensors = [torch.randn(4, device=where) for _ in range(TENSORS)]
    leaves = [torch.randn(4, device=where, requires_grad=n == 0) for n in range(TENSORS)]
    x = torch.randn(4, device=where, requires_grad=True)

    def save(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, *[None] * (TENSORS - 1)

    def on(
        args: Sequence[Tensor], found: Mapping[str, Function]
    ) -> dict[str, Callable[[], object]]:
        return {name: lambda function=function: function(*args) for name, function in found.items()}

    train = variants("train", lambda *xs: xs[0] * 2, MANY, (backward, save))
    sine = torchop.custom_op("bench::sine", torch.sin, mutates_args=(), schema=ONE)
    sine.derive_autograd()
    grad = torch.ones(4, device=where)
    empty = variants("empty", lambda *xs: torch.empty_like(xs[0]), MANY)
    copy = variants("copy", lambda *xs: xs[0].clone(), MANY)
    return {
        EMPTY: on(tensors, empty),
        COPY: on(tensors, copy),
        FORWARD: on(leaves, train),
        BACKWARD: {
            name: lambda function=function: function(*leaves).backward(grad)
            for name, function in train.items()
        },
        DERIVED: on([x], {PLAIN: torch.sin, HANDLE: sine}),
    }


def measure(settings: Settings) -> Tables:
    rounds, times = settings["rounds"], settings["calls"]
    return {title: time_calls(calls, rounds, times) for title, calls in cases().items()}


BENCHMARK = Benchmark(
    name="device",
    units=dict.fromkeys(TITLES, "us"),
    parts={"calls": measure},
    settings={"processes": 1, "rounds": 15, "calls": 300},
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
