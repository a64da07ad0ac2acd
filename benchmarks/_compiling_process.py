"""Make one measurement for `compiling.py` in this process, and print it as JSON.

python _compiling_process.py first ROUTE BACKEND COUNT
python _compiling_process.py calls ROUNDS
python _compiling_process.py chains ROUNDS
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Set before the imports: native calls from the start, and no cached graphs.
os.environ["TORCHOP_NATIVE"] = "require"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
import torch._inductor.config
from torch import Tensor

import _harness
import _structured
import torchop
from _harness import Call
from _structured import Config

FLAT, STRUCTURED, STOCK = ROUTES = ("torchop", "torchop, dataclass", "custom_op")
# Families of torchop, and PyTorch's equivalent.
FAMILY, OVERWRITING, TAGGED = ("out_op", "out_op, elementwise", "torch.Tag.out")
PLAIN_ROW, STRUCTURED_ROW, DERIVED_ROW = ("flat", _structured.TITLE, "derived, training")
CALLS = 10


def scale(x: Tensor, weight: Tensor, scale: float, *, count: int, flag: bool, mode: str) -> Tensor:
    return x * scale


def scale_structured(x: Tensor, config: Config) -> Tensor:
    return x * config.scale


def double(x: Tensor) -> Tensor:
    return x * 2


def like_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


class Step(NamedTuple):
    """A call in a program; the next step receives the result."""

    op: Callable[..., Tensor]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def step(route: str, name: str) -> Step:
    """Define an operator with five more arguments, or a dataclass of these, and return a call."""
    define = torch.library.custom_op if route == STOCK else torchop.custom_op
    namespace = "bench_custom_op" if route == STOCK else "bench_torchop"
    function = scale_structured if route == STRUCTURED else scale
    op: Any = define(f"{namespace}::{name}", function, mutates_args=())
    op.register_fake(like_first)
    weight = torch.ones(2)
    if route == STRUCTURED:
        config = Config(weight, 2.0)
        return Step(op, (config,))
    return Step(op, (weight, 2.0), {"count": 3, "flag": False, "mode": "linear"})


def program(steps: Sequence[Step]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for op, args, kwargs in steps:
            x = op(x, *args, **kwargs)
        return x

    # Dynamo attaches compiled graphs to code objects, and a call checks the guards of all of them.
    function.__code__ = function.__code__.replace()
    return function


def first_compile(route: str, backend: str, count: int) -> dict[str, float]:
    """Time the first call of a compiled program that calls `count` operators once each."""
    steps = [step(route, f"first_{index}") for index in range(count)]

    x = torch.ones(2)
    # Import Dynamo and the backend before the measurement.
    torch.compile(lambda x: x.sin() + 1, backend=backend)(x)
    compiled = torch.compile(program(steps), backend=backend, fullgraph=True)
    gc.collect()
    gc.freeze()
    start = time.thread_time()
    compiled(x)
    return {"milliseconds": (time.thread_time() - start) * 1e3}


def calls(rounds: int, backend: str = "inductor") -> dict[str, dict[str, float]]:
    """Return the microseconds per call of operators in compiled graphs."""
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    rows = {
        PLAIN_ROW: {route: (step(route, "flat"), x) for route in (FLAT, STOCK)},
        STRUCTURED_ROW: {
            STRUCTURED: (step(STRUCTURED, "structured"), x),
            FLAT: (step(FLAT, "fields"), x),
            STOCK: (step(STOCK, "fields"), x),
        },
        DERIVED_ROW: {route: (_trained(route), leaf) for route in (FLAT, STOCK)},
    }
    results = {}
    for row, routes in rows.items():
        graphs = {
            route: Call(
                torch.compile(program([call] * CALLS), fullgraph=True, backend=backend), (x,)
            )
            for route, (call, x) in routes.items()
        }
        for graph in graphs.values():
            graph.seconds(1)  # compiles
        gc.collect()
        gc.freeze()
        timings = _harness.measure(graphs, rounds)
        results[row] = {route: timing.median / CALLS for route, timing in timings.items()}
    return results


def _trained(route: str) -> Step:
    """Define an operator with a derived formula, or a written one for torch.library."""
    if route == STOCK:
        op: Any = torch.library.custom_op("bench_custom_op::double", double, mutates_args=())
        op.register_fake(like_first)
        # Saves the input, as the derived formula does in order to recompute the forward.
        op.register_autograd(
            lambda ctx, grad: grad * 2,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        return Step(op)
    op = torchop.custom_op("bench_torchop::double", double, mutates_args=())
    op.register_fake(like_first)
    op.derive_autograd()
    return Step(op)


def write_double(x: Tensor, *, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


def chains(rounds: int) -> dict[str, dict[str, float]]:
    """Return the time that a call adds to the kernel, and the peak memory of a chain of calls.

    The added time is the slope between chains of 10 and 30 calls, because guards and other costs
    per graph cancel out.
    """
    library = torch.library.Library("bench_out", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    tags = [tag for tag in (getattr(torch.Tag, "out", None),) if tag is not None]
    library.define("double.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=tags)
    library.impl("double", double, "CPU")
    library.impl("double.out", lambda x, *, out: torch.mul(x, 2, out=out), "CPU")
    torch.library.register_fake("bench_out::double", like_first, lib=library)
    stock: Any = torch.library.custom_op("bench_custom_op::chain", double, mutates_args=())
    flat = torchop.custom_op("bench_torchop::chain", double, mutates_args=())
    for op in (stock, flat):
        op.register_fake(like_first)
    family = torchop.out_op("bench_torchop::family", write_double, like="x")
    overwriting = torchop.out_op(
        "bench_torchop::overwriting", write_double, like="x", inplace=True, elementwise=True
    )
    operators = {
        FLAT: flat,
        FAMILY: family.functional,
        OVERWRITING: overwriting.functional,
        STOCK: stock,
        TAGGED: torch.ops.bench_out.double.default,
    }
    x = torch.ones(2)
    graphs = {"kernel": Call(double, (x,))}
    peaks = {}
    for route, op in operators.items():
        for count in (CALLS, 3 * CALLS):
            compiled = torch.compile(program([Step(op)] * count), dynamic=False)
            graphs[f"{route} {count}"] = Call(compiled, (x,))
            compiled(x)
        peaks[route] = _peak(torch.compile(program([Step(op)] * CALLS), dynamic=False))
    timings = {name: timing.median for name, timing in _harness.measure(graphs, rounds).items()}
    above = {
        route: (timings[f"{route} {3 * CALLS}"] - timings[f"{route} {CALLS}"]) / (2 * CALLS)
        - timings["kernel"]
        for route in operators
    }
    return {"above": above, "peak": peaks, "kernel": {"kernel": timings["kernel"]}}


def _peak(compiled: Callable[[Tensor], Tensor]) -> float:
    """Return the peak memory of a call, in multiples of the size of a result."""
    x = torch.ones(1 << 16)
    compiled(x)
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(x)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / x.nbytes


def measure(what: str, *arguments: str) -> Any:
    torch.set_num_threads(1)
    # Compile workers in the background would disturb the measurement.
    torch._inductor.config.compile_threads = 1
    if what == "first":
        route, backend, count = arguments
        return first_compile(route, backend, int(count))
    if what == "chains":
        return chains(int(arguments[0]))
    rounds, *backend_name = arguments
    return calls(int(rounds), *backend_name)


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
