"""Measure calls with tensors on a GPU.

The rows are ways to call the same function: the plain Python function, torchop's handle and
overload, `torch.library.custom_op`, the same accelerated, and `define` with `impl`. Each table is
one kind of work: an allocation without a launch, one launch, a formula that saves a tensor (forward
alone, then with backward), and a derived formula.

The first number is microseconds of CPU time of the calling thread. It excludes the backward on an
accelerator, which runs in another thread. The second is wall time until the device has finished.
Both are medians of rounds in which all ways take turns. Without an accelerator, the tensors are on
the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import _harness
import torchop

WARM_UP = 20
TENSORS = 14
MANY = f"({', '.join(f'Tensor x{number}' for number in range(TENSORS))}) -> Tensor"
ONE = "(Tensor x) -> Tensor"
PLAIN, HANDLE = "plain function", "torchop handle"

Way = Callable[..., Tensor]


def device() -> torch.device:
    """Return the accelerator, or the CPU if the machine has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def ways(
    name: str, body: Way, schema: str, formula: tuple[Any, Any] | None = None
) -> dict[str, Way]:
    """Define operators for a function, and return all ways to call it, by name."""
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
        "torchop, torch.ops": getattr(torch.ops.bench, name).default,
        "custom_op": stock,
        "custom_op, accelerated": fast,
        "define + impl": getattr(torch.ops.bench_low, name).default,
    }


def measure(
    calls: Mapping[str, Callable[[], object]], rounds: int, times: int
) -> dict[str, dict[str, float]]:
    """Return microseconds per call: CPU time of this thread, and wall time with synchronization."""
    wait = (lambda: None) if device().type == "cpu" else torch.accelerator.synchronize
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    busy: dict[str, list[float]] = {name: [] for name in calls}
    clock: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            started, cpu = time.perf_counter(), time.thread_time()
            for _ in range(times):
                call()
            busy[name].append((time.thread_time() - cpu) / times * 1e6)
            wait()
            clock[name].append((time.perf_counter() - started) / times * 1e6)
    return {
        name: {"cpu": statistics.median(busy[name]), "clock": statistics.median(clock[name])}
        for name in calls
    }


def cases() -> dict[str, dict[str, Callable[[], object]]]:
    """Return the measured calls, by title of the table."""
    where = device()
    tensors = [torch.randn(4, device=where) for _ in range(TENSORS)]
    leaves = [torch.randn(4, device=where, requires_grad=n == 0) for n in range(TENSORS)]
    x = torch.randn(4, device=where, requires_grad=True)

    def saves(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, *[None] * (TENSORS - 1)

    def on(args: Sequence[Tensor], found: Mapping[str, Way]) -> dict[str, Callable[[], object]]:
        return {name: lambda way=way: way(*args) for name, way in found.items()}

    train = ways("train", lambda *xs: xs[0] * 2, MANY, (backward, saves))
    sine = torchop.custom_op("bench::sine", torch.sin, mutates_args=(), schema=ONE)
    sine.derive_autograd()
    grad = torch.ones(4, device=where)
    return {
        f"{TENSORS} tensors, an allocation and no launch": on(
            tensors, ways("empty", lambda *xs: torch.empty_like(xs[0]), MANY)
        ),
        f"{TENSORS} tensors, one launch": on(
            tensors, ways("copy", lambda *xs: xs[0].clone(), MANY)
        ),
        f"{TENSORS} tensors, a formula that saves one, forward": on(leaves, train),
        "the same, forward and backward": {
            name: lambda way=way: way(*leaves).backward(grad) for name, way in train.items()
        },
        "a derived formula, forward": on([x], {PLAIN: torch.sin, HANDLE: sine}),
    }


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of all ways")
    parser.add_argument("--calls", type=int, default=300, help="calls per way and round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torchop.native.wait()
    console = _harness.console()
    results = {}
    for title, calls in cases().items():
        results[title] = measure(calls, options.rounds, options.calls)
        shown = _harness.table(title, "", "cpu us", "of plain", "clock us", "of plain")
        plain = results[title][PLAIN]
        for name, micros in results[title].items():
            pairs = ((micros[kind], micros[kind] / plain[kind]) for kind in ("cpu", "clock"))
            shown.add_row(name, *(f"{number:.2f}" for pair in pairs for number in pair))
        console.print(shown)
    name = torch.cuda.get_device_name() if device().type == "cuda" else str(device())
    _harness.write_json(options.json, {"unit": "microseconds", "device": name, "calls": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
