"""Measure operators with `torch.compile`: the first compilation, and calls in compiled graphs.

The benchmark prints four tables:

- "first compilation": the CPU time (in milliseconds) of the first call to a compiled program with
  many operators. The backend has been imported before.
- "call in a graph": the time of one call in a graph of ten calls, guards included.
- "overhead in a graph": the time that a call takes in addition to its kernel. It is the difference
  between graphs of ten and thirty calls, so it includes no costs per graph.
- "peak memory": the most memory that a graph of ten calls allocates at a time. The unit is the size
  of one call's result.

The variants are:

- torchop: an operator of `torchop.custom_op` with five arguments besides the tensor.
- torchop, dataclass: the same operator, but with the five arguments in a dataclass.
- custom_op: the same operator with `torch.library.custom_op`.
- out_op: an operator of `torchop.out_op`, for whose results Inductor allocates the memory.
- out_op, elementwise: the same operator, but results may reuse the memory of inputs.
- torch.Tag.out: an operator of `torch.library` with an overload that has the tag `out`.

In the row "derived, training", torchop derives the gradient formula from the kernel, whereas the
formula for custom_op is written by hand.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch import Tensor

import harness
import torchop
from calls import Config
from harness import Benchmark, Limit, Settings, Tables, Variant

FLAT, STRUCTURED, STOCK = "torchop", "torchop, dataclass", "custom_op"
FAMILY, OVERWRITING, TAGGED = "out_op", "out_op, elementwise", "torch.Tag.out"
FIRST, CALLS, OVERHEAD, PEAK = (
    "first compilation",
    "call in a graph",
    "overhead in a graph",
    "peak memory",
)
PLAIN_ROW, STRUCTURED_ROW, DERIVED_ROW = "5 arguments", "dataclass, 5 fields", "derived, training"
ELEMENTWISE = "elementwise"
BACKEND = "inductor"
LENGTH = 10  # calls in a graph


def scale(x: Tensor, weight: Tensor, scale: float, *, count: int, flag: bool, mode: str) -> Tensor:
    return x * scale


def scale_structured(x: Tensor, config: Config) -> Tensor:
    return x * config.scale


def double(x: Tensor) -> Tensor:
    return x * 2


def write_double(x: Tensor, *, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


def like_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


class Step(NamedTuple):
    """A call in a program. The result of the previous step is passed as the first argument."""

    op: Callable[..., Tensor]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def step(variant: str, name: str) -> Step:
    """Define an operator with five arguments besides the tensor, and return a call to it."""
    define = torch.library.custom_op if variant == STOCK else torchop.custom_op
    namespace = "bench_custom_op" if variant == STOCK else "bench_torchop"
    function = scale_structured if variant == STRUCTURED else scale
    op: Any = define(f"{namespace}::{name}", function, mutates_args=())
    op.register_fake(like_first)
    weight = torch.ones(2)
    if variant == STRUCTURED:
        return Step(op, (Config(weight, 2.0),))
    return Step(op, (weight, 2.0), {"count": 3, "flag": False, "mode": "linear"})


def training_step(variant: str) -> Step:
    """Define an operator with a gradient formula, and return a call to it.

    torchop's operator has a derived formula, and custom_op's operator an explicit one.
    """
    if variant == STOCK:
        op: Any = torch.library.custom_op("bench_custom_op::double", double, mutates_args=())
        op.register_fake(like_first)
        # Save the input, although this formula does not need it, because a derived formula saves it
        # too, and both variants should do the same work.
        op.register_autograd(
            lambda ctx, grad: grad * 2,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        return Step(op)
    op = torchop.custom_op("bench_torchop::double", double, mutates_args=())
    op.register_fake(like_first)
    op.derive_autograd()
    return Step(op)


def program(steps: Sequence[Step]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for op, args, kwargs in steps:
            x = op(x, *args, **kwargs)
        return x

    # Use a new code object for each program. Dynamo stores graphs under the code object, so each
    # call would otherwise check the guards of all programs.
    function.__code__ = function.__code__.replace()
    return function


# --------------------------------------------------------------------------------------------------
# The parts


def first_compilation(settings: Settings, backend: str, share: int, variant: str) -> Tables:
    count = settings["operators"] // share
    steps = [step(variant, f"first_{index}") for index in range(count)]
    x = torch.ones(2)
    torch.compile(lambda x: x.sin() + 1, backend=backend)(x)  # imports Dynamo and the backend
    compiled = torch.compile(program(steps), backend=backend, fullgraph=True)
    gc.collect()
    gc.freeze()
    start = time.thread_time()
    compiled(x)
    return {FIRST: {first_row(backend, share): {variant: (time.thread_time() - start) * 1e3}}}


def first_row(backend: str, share: int) -> str:
    return f"{backend}, {'all' if share == 1 else 'half of the'} operators"


def calls(settings: Settings) -> Tables:
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    rows = {
        PLAIN_ROW: {variant: (step(variant, "flat"), x) for variant in (FLAT, STOCK)},
        STRUCTURED_ROW: {
            STRUCTURED: (step(STRUCTURED, "structured"), x),
            FLAT: (step(FLAT, "fields"), x),
            STOCK: (step(STOCK, "fields"), x),
        },
        DERIVED_ROW: {variant: (training_step(variant), leaf) for variant in (FLAT, STOCK)},
    }
    found: dict[str, dict[str, float]] = {}
    for row, variants in rows.items():
        graphs = {}
        for variant, (call, argument) in variants.items():
            graph = torch.compile(program([call] * LENGTH), fullgraph=True, backend=BACKEND)
            graph(argument)
            graphs[variant] = Variant(graph, (argument,))
        micros = harness.measure(graphs, settings["rounds"])
        found[row] = {variant: number / LENGTH for variant, number in micros.items()}
    return {CALLS: found}


def chains(settings: Settings) -> Tables:
    """Measure the overhead of a call in a graph, and the peak memory of a graph."""
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
    graphs = {"kernel": Variant(double, (x,))}
    peaks = {}
    for name, op in operators.items():
        for count in (LENGTH, 3 * LENGTH):
            graph = torch.compile(program([Step(op)] * count), dynamic=False, backend=BACKEND)
            graph(x)
            graphs[f"{name} {count}"] = Variant(graph, (x,))
        peaks[name] = peak(
            torch.compile(program([Step(op)] * LENGTH), dynamic=False, backend=BACKEND)
        )
    micros = harness.measure(graphs, settings["rounds"])
    overhead = {
        name: (micros[f"{name} {3 * LENGTH}"] - micros[f"{name} {LENGTH}"]) / (2 * LENGTH)
        - micros["kernel"]
        for name in operators
    }
    return {OVERHEAD: {ELEMENTWISE: overhead}, PEAK: {ELEMENTWISE: peaks}}


def peak(compiled: Callable[[Tensor], Tensor]) -> float:
    """Return the most memory that a call allocates at a time, as a multiple of its argument."""
    x = torch.ones(1 << 16)
    compiled(x)
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(x)
    allocated = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    return most / x.nbytes


# The backend, divisor and variants of each program. The number of operators in a program is the
# setting `operators`, divided by the divisor.
PROGRAMS = (
    ("eager", 1, (FLAT, STOCK)),
    ("aot_eager", 1, (FLAT, STOCK)),
    ("aot_eager", 2, (FLAT, STRUCTURED, STOCK)),
)
HALF = first_row("aot_eager", 2)

BENCHMARK = Benchmark(
    name="compiling",
    units={FIRST: "ms", CALLS: "us", OVERHEAD: "us", PEAK: "results"},
    parts={
        f"{first_row(backend, share)}, {variant}": functools.partial(
            first_compilation, backend=backend, share=share, variant=variant
        )
        for backend, share, variants in PROGRAMS
        for variant in variants
    }
    | {"calls": calls, "chains": chains},
    settings={"processes": 3, "rounds": 40, "operators": 40},
    limits=(
        *(Limit(FIRST, first_row(*row), FLAT, 1.0, STOCK) for *row, _ in PROGRAMS),
        Limit(FIRST, HALF, STRUCTURED, 1.28, FLAT),
        Limit(CALLS, PLAIN_ROW, FLAT, 0.34, STOCK),
        Limit(CALLS, STRUCTURED_ROW, STRUCTURED, 0.43, STOCK, PLAIN_ROW),
        Limit(CALLS, DERIVED_ROW, FLAT, 0.63, STOCK, PLAIN_ROW),
        Limit(OVERHEAD, ELEMENTWISE, FLAT, 0.15, STOCK),
        # A call must be as fast as with PyTorch's tag, except for noise.
        Limit(OVERHEAD, ELEMENTWISE, FAMILY, 1.15, TAGGED),
        Limit(OVERHEAD, ELEMENTWISE, OVERWRITING, 1.15, TAGGED),
    ),
    environment={**harness.ENVIRONMENT, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
