"""Measure sharding rules: calls on DTensors, and the decision about a new call.

Calls: an operator on a tensor of 8 by 8, on a fake process group without communication. Each column
is a way to run it on shards:

- local: the operator on the local shard, without DTensor.
- rule: torchop's `register_sharding("pointwise")`.
- register_sharding: torchop's operator with PyTorch's experimental `register_sharding`.
- stock: an operator of `torch.library.custom_op` with the same function of PyTorch.
- aten: `x.sin()` on the DTensor, with PyTorch's strategy.
- local_map: the operator in `torch.distributed.tensor.experimental.local_map`.

Decisions: the time of a call with uncached placements, for a matrix product with a rule and for
`aten.mm`, on meshes of 8 to 100,000 ranks with 1 to 3 dimensions, and the memory of the cached
decisions. Then the same for a list of 16 tensors, with a pointwise rule and for `torch.cat`, and
the memory that a call with a new shape adds.

Results: DTensor caches decisions, so calls cost the same with any rule, and the time of a decision
does not depend on the number of ranks. For many tensors, a rule takes about as much time and memory
as `cat`. The difference is the fake kernel, whose results PyTorch caches only for ATen operators.
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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.library
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map, register_sharding
from torch.testing._internal.distributed.fake_pg import FakeStore

import _harness
import torchop
from _harness import Bar, Call
from torchop._compat.dtensor import clear_caches

LOCAL, RULE, EXPERIMENTAL, STOCK, ATEN, MAP = (
    "local",
    "rule",
    "register_sharding",
    "stock",
    "aten",
    "local_map",
)
MANY = 16  # tensors in a list
MESHES = ((8,), (2, 4), (2, 2, 2), (1000,), (100_000,), (100, 1000), (10, 100, 100))


def sine(x: Tensor) -> Tensor:
    return x.sin()


def defined(library: Any, name: str) -> Any:
    op = library.custom_op(f"bench_sharding::{name}", sine, mutates_args=())
    op.register_fake(torch.empty_like)
    return op


def by_placements(name: str) -> None:
    overload = getattr(torch.ops.bench_sharding, name).default
    register_sharding(overload)(
        lambda x: [([p], [p]) for p in (Replicate(), *map(Shard, range(len(x.shape))))]
    )


def product() -> Any:
    op = torchop.custom_op(
        "bench_sharding::mm", torch.mm, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
    )
    op.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    op.register_sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))
    return op


def calls_on(shape: tuple[int, ...], operators: dict[str, Any]) -> dict[str, Call]:
    """Return the same call by every route."""
    mesh = init_device_mesh("cpu", shape)
    rows = [Shard(0)] * mesh.ndim
    local = torch.randn(8, 8)
    x = DTensor.from_local(local, mesh, rows, run_check=False)
    plain = operators[RULE]
    mapped = local_map(
        lambda x: plain(x), out_placements=rows, in_placements=(rows,), device_mesh=mesh
    )
    routes = {name: Call(op, (x,)) for name, op in operators.items()}
    return {
        LOCAL: Call(plain, (local,)),
        **routes,
        ATEN: Call(torch.sin, (x,)),
        MAP: Call(mapped, (x,)),
    }


def propagation(shape: tuple[int, ...], op: Any, repeats: int) -> dict[str, float]:
    """Measure the decision about a matrix product."""
    mesh = init_device_mesh("cpu", shape)
    a = DTensor.from_local(torch.randn(8, 64), mesh, [Shard(0)] * mesh.ndim, run_check=False)
    b = DTensor.from_local(torch.randn(64, 64), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return deciding({RULE: op, ATEN: torch.mm}, a, b, repeats=repeats)


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


def many(shape: tuple[int, ...], op: Any, repeats: int) -> dict[str, float]:
    """Measure the decision about a list of tensors, and the bytes that a new shape adds."""
    mesh = init_device_mesh("cpu", shape)
    rows = [Shard(0)] * mesh.ndim
    # Along a dimension that is not sharded, so no route redistributes.
    routes = {RULE: op, ATEN: functools.partial(torch.cat, dim=1)}

    def tensors(length: int) -> list[Any]:
        return [
            DTensor.from_local(torch.empty(length, 8), mesh, rows, run_check=False)
            for _ in range(MANY)
        ]

    result = deciding(routes, tensors(8), repeats=repeats)
    for start, (name, function) in enumerate(routes.items(), 1):
        for length in range(20):  # the first calls import modules
            function(tensors(1000 * start + length))
        gc.collect()
        tracemalloc.start()
        for length in range(20, 20 + repeats):
            function(tensors(1000 * start + length))
        gc.collect()
        result[f"bytes, {name}"] = tracemalloc.get_traced_memory()[0] / repeats
        tracemalloc.stop()
    return result


def deciding(routes: dict[str, Callable[..., Any]], *args: Any, repeats: int) -> dict[str, float]:
    """Return the milliseconds of an uncached call by route, and the growth of the process."""
    times: dict[str, list[float]] = {name: [] for name in routes}
    for function in routes.values():
        function(*args)  # the first call imports modules
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(repeats):
        for name, function in routes.items():
            clear_caches()
            start = time.thread_time()
            function(*args)
            times[name].append((time.thread_time() - start) * 1e3)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {**{n: statistics.median(t) for n, t in times.items()}, "kilobytes": float(grown)}


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="timed blocks per call")
    parser.add_argument("--repeats", type=int, default=30, help="decisions of each kind")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    operators = {RULE: defined(torchop, "rule"), EXPERIMENTAL: defined(torchop, "experimental")}
    operators[STOCK] = defined(torch.library, "stock")
    operators[RULE].register_sharding("pointwise")
    by_placements("experimental")
    by_placements("stock")
    op = product()
    store, bars = FakeStore(), []
    console = _harness.console()
    results: dict[str, Any] = {"calls": {}, "propagation": {}, "many": {}}

    dist.init_process_group("fake", store=store, rank=0, world_size=4)
    table = _harness.table("Microseconds for a call", "mesh", LOCAL, *operators, ATEN, MAP)
    with torch.no_grad():
        for shape in ((4,), (2, 2)):
            timings = _harness.measure(calls_on(shape, operators), arguments.rounds)
            micros = {name: timing.median for name, timing in timings.items()}
            label = " x ".join(map(str, shape))
            results["calls"][label] = micros
            table.add_row(label, *(f"{micros[name]:.1f}" for name in table_names(operators)))
            ratio = micros[RULE] / micros[STOCK]
            bars.append(Bar(f"a call on {label}, rule / stock", ratio, 1.0))
    dist.destroy_process_group()
    console.print(table)

    table = _harness.table("Milliseconds to decide", "mesh", "ranks", RULE, ATEN, "ratio", "KB")
    with torch.no_grad():
        for shape in MESHES:
            ranks = math.prod(shape)
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            measured = propagation(shape, op, arguments.repeats)
            dist.destroy_process_group()
            label = " x ".join(map(str, shape))
            results["propagation"][label] = measured
            ratio = measured[RULE] / measured[ATEN]
            table.add_row(
                label,
                f"{ranks:,}",
                f"{measured[RULE]:.2f}",
                f"{measured[ATEN]:.2f}",
                f"{ratio:.2f}",
                f"{measured['kilobytes']:.0f}",
            )
            bars.append(Bar(f"deciding on {label}, rule / aten.mm", ratio, 1.5))
            grown = measured["kilobytes"] / arguments.repeats
            bars.append(Bar(f"memory of a decision on {label}", grown, 64, " KB"))
    console.print(table)

    table = _harness.table(f"{MANY} tensors", "mesh", RULE, "cat", "ratio", "bytes", "bytes of cat")
    op = sum_of_many()
    with torch.no_grad():
        for shape in MESHES[:3]:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
            measured = many(shape, op, arguments.repeats)
            dist.destroy_process_group()
            label = " x ".join(map(str, shape))
            results["many"][label] = measured
            columns = (RULE, ATEN, f"bytes, {RULE}", f"bytes, {ATEN}")
            rule, cat, kept, kept_by_cat = (measured[name] for name in columns)
            row = (f"{rule:.2f}", f"{cat:.2f}", f"{rule / cat:.2f}", f"{kept:.0f}")
            table.add_row(label, *row, f"{kept_by_cat:.0f}")
            bars.append(Bar(f"deciding about {MANY} on {label}, rule / cat", rule / cat, 2.0))
            bars.append(Bar(f"memory of a shape on {label}, rule / cat", kept / kept_by_cat, 1.25))
    console.print(table)

    _harness.print_bars(console, bars)
    results["bars"] = _harness.bars_as_json(bars)
    _harness.write_json(arguments.json, results)
    return 0 if all(bar.passed for bar in bars) else 1


def table_names(operators: dict[str, Any]) -> list[str]:
    return [LOCAL, *operators, ATEN, MAP]


if __name__ == "__main__":
    sys.exit(main())
