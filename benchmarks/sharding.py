"""Measure calls with DTensors to operators that have sharding rules, on a fake process group.

The benchmark prints five tables:

- "calls": the time of a call with an 8 by 8 tensor.
- "propagation": the time to propagate the sharding of a matrix product whose placements are not yet
  in DTensor's cache.
- "propagation, 16 tensors": the time to propagate the sharding of a list of tensors, for an
  operator that has a pointwise rule and for `torch.cat`.
- "memory of a propagation", "memory of a new shape": how much the memory of the process grows with
  each propagation, and with each new shape.

The variants of "calls" are:

- local: the operator on the shard itself, without DTensor.
- rule: torchop's operator with torchop's `register_sharding("pointwise")`.
- register_sharding: torchop's operator with PyTorch's experimental `register_sharding`.
- stock: an operator of `torch.library.custom_op` with PyTorch's experimental `register_sharding`.
- aten: `torch.sin`, with the sharding strategy that PyTorch has for it.
- local_map: the operator inside `torch.distributed.tensor.experimental.local_map`.
"""

from __future__ import annotations

import functools
import gc
import math
import resource
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.library
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map, register_sharding
from torch.testing._internal.distributed.fake_pg import FakeStore

import harness
import torchop
from harness import Benchmark, Limit, Settings, Tables, Variant
from torchop._compat.dtensor import clear_caches

LOCAL, RULE, EXPERIMENTAL, STOCK, ATEN, MAP = (
    "local",
    "rule",
    "register_sharding",
    "stock",
    "aten",
    "local_map",
)
MANY = 16  # number of tensors in a list
CALLS, PROPAGATION, PROPAGATION_OF_MANY = "calls", "propagation", f"propagation, {MANY} tensors"
MEMORY, MEMORY_OF_SHAPE = "memory of a propagation", "memory of a new shape"
CALL_MESHES = ((4,), (2, 2))
MESHES = ((8,), (2, 4), (2, 2, 2), (1000,), (100_000,), (100, 1000), (10, 100, 100))

Shape = tuple[int, ...]


def label(shape: Shape) -> str:
    return " x ".join(map(str, shape))


@contextmanager
def process_group(shape: Shape) -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------
# Operators


def sine(x: Tensor) -> Tensor:
    return x.sin()


def define(library: Any, name: str) -> Any:
    op = library.custom_op(f"bench_sharding::{name}", sine, mutates_args=())
    op.register_fake(torch.empty_like)
    return op


def register_experimental(name: str) -> None:
    overload = getattr(torch.ops.bench_sharding, name).default
    register_sharding(overload)(
        lambda x: [([p], [p]) for p in (Replicate(), *map(Shard, range(len(x.shape))))]
    )


def matrix_product() -> Any:
    op = torchop.custom_op(
        "bench_sharding::mm", torch.mm, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
    )
    op.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    op.register_sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))
    return op


def sum_of_many() -> Any:
    op = torchop.custom_op(
        "bench_sharding::many",
        lambda xs: torch.stack(xs).sum(0),
        mutates_args=(),
        schema="(Tensor[] xs) -> Tensor",
    )
    op.register_fake(lambda xs: torch.empty_like(xs[0]))
    op.register_sharding("pointwise")
    return op


# --------------------------------------------------------------------------------------------------
# The parts


def calls(settings: Settings) -> Tables:
    """Time calls whose placements are already in DTensor's cache."""
    operators = {RULE: define(torchop, "rule"), EXPERIMENTAL: define(torchop, "experimental")}
    operators[STOCK] = define(torch.library, "stock")
    operators[RULE].register_sharding("pointwise")
    register_experimental("experimental")
    register_experimental("stock")
    plain = operators[RULE]
    rows = {}
    for shape in CALL_MESHES:
        with process_group(shape) as mesh:
            placements = [Shard(0)] * mesh.ndim
            local = torch.randn(8, 8)
            x = DTensor.from_local(local, mesh, placements, run_check=False)
            mapped = local_map(
                lambda x: plain(x),
                out_placements=placements,
                in_placements=(placements,),
                device_mesh=mesh,
            )
            variants = {LOCAL: Variant(plain, (local,))}
            variants |= {name: Variant(op, (x,)) for name, op in operators.items()}
            variants |= {ATEN: Variant(torch.sin, (x,)), MAP: Variant(mapped, (x,))}
            rows[label(shape)] = harness.measure(variants, settings["rounds"])
    return {CALLS: rows}


def propagation(settings: Settings) -> Tables:
    """Time matrix products whose placements are not in DTensor's cache, on meshes of all sizes."""
    op, repeats = matrix_product(), settings["repeats"]
    tables: Tables = {PROPAGATION: {}, MEMORY: {}}
    for shape in MESHES:
        with process_group(shape) as mesh:
            a, b = torch.randn(8, 64), torch.randn(64, 64)
            left = DTensor.from_local(a, mesh, [Shard(0)] * mesh.ndim, run_check=False)
            right = DTensor.from_local(b, mesh, [Replicate()] * mesh.ndim, run_check=False)
            functions = {RULE: op, ATEN: torch.mm}
            times, kilobytes = propagate(functions, left, right, repeats=repeats)
        tables[PROPAGATION][label(shape)] = times
        tables[MEMORY][label(shape)] = {"both": kilobytes / repeats}
    return tables


def many(settings: Settings) -> Tables:
    """Time propagation for a list of tensors, and measure the memory that each new shape takes."""
    op, repeats = sum_of_many(), settings["repeats"]
    # Concatenate along a dimension that is not sharded, because no variant must redistribute
    # tensors.
    functions = {RULE: op, ATEN: functools.partial(torch.cat, dim=1)}
    tables: Tables = {PROPAGATION_OF_MANY: {}, MEMORY_OF_SHAPE: {}}
    for shape in MESHES[:3]:
        with process_group(shape) as mesh:
            rows = [Shard(0)] * mesh.ndim

            def tensors(length: int, mesh: Any = mesh, rows: Any = rows) -> list[Any]:
                return [
                    DTensor.from_local(torch.empty(length, 8), mesh, rows, run_check=False)
                    for _ in range(MANY)
                ]

            times, _ = propagate(functions, tensors(8), repeats=repeats)
            tables[PROPAGATION_OF_MANY][label(shape)] = times
            kept = {}
            for start, (name, function) in enumerate(functions.items(), 1):
                for length in range(20):  # the first calls import modules and fill caches
                    function(tensors(1000 * start + length))
                gc.collect()
                tracemalloc.start()
                for length in range(20, 20 + repeats):
                    function(tensors(1000 * start + length))
                gc.collect()
                kept[name] = tracemalloc.get_traced_memory()[0] / repeats
                tracemalloc.stop()
            tables[MEMORY_OF_SHAPE][label(shape)] = kept
    return tables


def propagate(
    functions: dict[str, Callable[..., Any]], *args: Any, repeats: int
) -> tuple[dict[str, float], float]:
    """Return the time of a call with an empty DTensor cache in ms, and the memory growth in KB."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function(*args)  # the first call imports modules
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(repeats):
        for name, function in functions.items():
            clear_caches()
            start = time.thread_time()
            function(*args)
            times[name].append((time.thread_time() - start) * 1e3)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians, grown / (1024 if sys.platform == "darwin" else 1)


BENCHMARK = Benchmark(
    name="sharding",
    units={CALLS: "us", PROPAGATION: "ms", PROPAGATION_OF_MANY: "ms"}
    | {MEMORY: "KB", MEMORY_OF_SHAPE: "bytes"},
    parts={"calls": calls, "propagation": propagation, "many": many},
    settings={"processes": 1, "rounds": 60, "repeats": 30},
    limits=(
        *(Limit(CALLS, label(shape), RULE, 1.0, STOCK) for shape in CALL_MESHES),
        *(Limit(PROPAGATION, label(shape), RULE, 1.5, ATEN) for shape in MESHES),
        *(Limit(MEMORY, label(shape), "both", 64) for shape in MESHES),
        *(Limit(PROPAGATION_OF_MANY, label(shape), RULE, 2.0, ATEN) for shape in MESHES[:3]),
        *(Limit(MEMORY_OF_SHAPE, label(shape), RULE, 1.25, ATEN) for shape in MESHES[:3]),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
