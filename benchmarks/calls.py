"""Measure how long calls to small operators take, with torchop and with `torch.library`.

Each row of the table is a function and a way to call it. The variants (columns) are:

- plain call: the Python function itself.
- torchop handle: the result of `torchop.custom_op`.
- torch.ops: the same operator, called as `torch.ops.<namespace>.<name>.default`.
- custom_op: the result of `torch.library.custom_op`.
- accelerated: the same custom_op operator after `torchop.accelerate`.
- define + impl: an operator from `torch.library.define` and `torch.library.impl`, called through
  `torch.ops`. Its calls neither check results for aliases nor bump versions of mutated arguments.
- C++ op: `TORCH_LIBRARY` with a C++ kernel, and a C++ formula if gradients are recorded.
- autograd.Function: a `torch.autograd.Function`, without an operator.

Unless a row says otherwise, the function has 14 tensor arguments with 4 elements each, and clones
the first of them (as in pytorch/pytorch#177109). The numbers are microseconds of CPU time per call.
All of torchop's features are enabled, so each call checks its results, reads the dispatch table and
bumps versions. The benchmark fails if `torchop.native.counters` shows that calls were not native,
or that calls that should fall back to the dispatcher did not.

Some rows have a special operator:

- "dataclass, 5 fields": the handle flattens a dataclass, and the kernel receives a new one.
- "operator of PyTorch": `torch.ops.aten.neg.default`. torchop replaces the C function that calls
  objects in `torch.ops`, which also affects PyTorch's operators. The variant "plain call" uses
  PyTorch's original function.
- "profiler", "dispatch mode", "tensor subclass": calls that fall back to the dispatcher.
- "Inductor graph": one call in a compiled graph of ten calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

import _cpp_op
import harness
import torchop
from _cases import (
    CASES,
    CLONE_FIRST,
    FOURTEEN,
    GRAD,
    GRAD_1,
    GRAD_NON_LEAVES,
    IN_MODE,
    IN_PLACE,
    INFERENCE,
    MUTATION,
    MUTATION_OF_3,
    ONE,
    OUT,
    PARAMETER,
    PROFILED,
    SAVES,
    SUBCLASS,
    TRAINING,
    TYPED,
    Case,
)
from harness import Benchmark, Limit, Settings, Tables, Variant
from torchop._errors import NativeUnavailableError

TABLE = "calls"
PLAIN, HANDLE, OPS, CUSTOM_OP, ACCELERATED, LOW_LEVEL, CPP, WRITTEN = (
    "plain call",
    "torchop handle",
    "torch.ops",
    "custom_op",
    "accelerated",
    "define + impl",
    "C++ op",
    "autograd.Function",
)
DATACLASS, PYTORCH, GRAPH = "dataclass, 5 fields", "operator of PyTorch", "Inductor graph"
GRAPH_CALLS = 10


class Row(NamedTuple):
    """The calls to time for one row.

    `variants` maps the name of each variant to a call, and `handle` is torchop's operator. Calls to
    this operator must increment the counters `counters` of `torchop.native`.
    """

    variants: Mapping[str, Variant]
    handle: Any
    counters: tuple[str, ...] = ("native",)


def measure(settings: Settings) -> Tables:
    try:
        torch.ops.load_library(str(_cpp_op.build()))
        cpp = True
    except NativeUnavailableError:
        cpp = False  # no compiler was found
    rounds = settings["rounds"]
    rows: dict[str, dict[str, float]] = {}
    for case in CASES:
        with case.context():
            rows[case.title] = time_row(case.title, case_row(case, cpp=cpp), rounds)
    rows[DATACLASS] = time_row(DATACLASS, dataclass_row(), rounds)
    rows[PYTORCH] = harness.measure(calls_of_pytorch(), rounds)
    # Compile only now, because compiling creates many objects, and so slows down the garbage
    # collector.
    graph = time_row(GRAPH, graph_row(), rounds)
    rows[GRAPH] = {name: micros / GRAPH_CALLS for name, micros in graph.items()}
    return {TABLE: rows}


def time_row(title: str, row: Row, rounds: int) -> dict[str, float]:
    """Time a row. Raise RuntimeError if it incremented unexpected counters of `torchop.native`."""
    for variant in row.variants.values():
        variant.function(*variant.args, **variant.kwargs)  # compiles the rules, or the graph
    before = Counter(torchop.native.counters(row.handle))
    micros = harness.measure(row.variants, rounds)
    counted = Counter(torchop.native.counters(row.handle)) - before
    if set(counted) != set(row.counters):
        raise RuntimeError(
            f"{title}: calls to torchop incremented the counters {sorted(counted)} instead of "
            f"{sorted(row.counters)}. Do not compare these numbers with the other rows."
        )
    return micros


# --------------------------------------------------------------------------------------------------
# Rows


def case_row(case: Case, *, cpp: bool) -> Row:
    """Define the operators of a case, and return the calls to time.

    `cpp` is true if the C++ operators in clone_first.cpp were compiled.
    """
    name, function = case.name, case.function
    low_level = f"bench_low_level::{name}"
    tags = tuple(getattr(torch.Tag, tag) for tag in case.tags)
    options: dict[str, Any] = {"mutates_args": case.mutates_args, "tags": tags}
    ours = torchop.custom_op(f"bench_torchop::{name}", function, **options)
    stock = torch.library.custom_op(f"bench_custom_op::{name}", function, **options)
    fast = torch.library.custom_op(f"bench_accelerated::{name}", function, **options)
    torch.library.define(low_level, torchop.infer_schema(function, **options), tags=tags)
    torch.library.impl(low_level, "cpu", function)
    if case.formula is not None:
        backward, setup_context = case.formula
        ours.register_autograd(backward, setup_context=setup_context)
        for op in (stock, fast, low_level):
            torch.library.register_autograd(op, backward, setup_context=setup_context)
    torchop.accelerate(f"bench_accelerated::{name}")
    functions: dict[str, Callable[..., Any]] = {
        PLAIN: function,
        HANDLE: ours,
        OPS: ours.overload,
        CUSTOM_OP: stock,
        ACCELERATED: fast,
        LOW_LEVEL: getattr(torch.ops.bench_low_level, name).default,
    }
    if cpp and case.cpp is not None:
        functions[CPP] = getattr(torch.ops.bench_cpp, case.cpp).default
    if case.written is not None:
        functions[WRITTEN] = case.written.apply
    if case.backward:
        functions = {route: _and_backward(function) for route, function in functions.items()}
    args, kwargs = case.arguments()
    variants = {route: Variant(function, args, kwargs) for route, function in functions.items()}
    return Row(variants, ours, case.counters)


def _and_backward(function: Callable[..., Tensor]) -> Callable[..., None]:
    gradient = torch.ones(4)

    def step(*args: Tensor) -> None:
        function(*args).backward(gradient)

    return step


@dataclasses.dataclass(frozen=True)
class Config:
    weight: Tensor
    scale: float = 1.0
    count: int = 3
    flag: bool = False
    mode: str = "linear"


def clone_with_config(x: Tensor, config: Config) -> Tensor:
    return x.clone()


def dataclass_row() -> Row:
    ours = torchop.custom_op("bench_torchop::structured", clone_with_config, mutates_args=())
    x, config = torch.randn(4), Config(torch.randn(4), 2.0)
    values = dataclasses.asdict(config)
    flat = {f"config_{name}": values[name] for name in ("scale", "count", "flag", "mode")}
    variants = {
        PLAIN: Variant(clone_with_config, [x, config]),
        HANDLE: Variant(ours, [x, config]),
        OPS: Variant(ours.overload, [x, config.weight], flat),
    }
    return Row(variants, ours)


def graph_row() -> Row:
    import torch._inductor.config  # slow, and only this function needs it

    ours = torchop.custom_op("bench_torchop::compiled", CLONE_FIRST, mutates_args=())
    stock = torch.library.custom_op("bench_custom_op::compiled", CLONE_FIRST, mutates_args=())
    for op in (ours, stock):
        op.register_fake(lambda x, *others: torch.empty_like(x))
    xs = [torch.randn(4) for _ in range(14)]
    routes = {HANDLE: ours, CUSTOM_OP: stock}
    return Row({route: Variant(_graph(op), xs) for route, op in routes.items()}, ours)


def _graph(op: Callable[..., Tensor]) -> Callable[..., Any]:
    def graph(x: Tensor, *others: Tensor) -> Tensor:
        for _ in range(GRAPH_CALLS):
            x = op(x, *others)
        return x

    return torch.compile(graph, fullgraph=True)


def calls_of_pytorch() -> dict[str, Variant]:
    """Return calls to an operator of PyTorch, with and without torchop's own `tp_call`."""
    # PyObject_VAR_HEAD (3 pointers) and 13 fields precede tp_call in PyTypeObject.
    offset = 16 * ctypes.sizeof(ctypes.c_void_p)
    slot = ctypes.c_void_p.from_address(id(OpOverload) + offset)
    # The original function. CPython uses it as tp_call for all classes whose `__call__` is a Python
    # function.
    stock = ctypes.c_void_p.from_address(id(_Callable) + offset).value
    if slot.value == stock:
        raise RuntimeError("torchop has not replaced tp_call of OpOverload. Load its extension.")

    @contextlib.contextmanager
    def without_torchop() -> Iterator[None]:
        ours, slot.value = slot.value, stock
        try:
            yield
        finally:
            slot.value = ours

    function, arguments = torch.ops.aten.neg.default, [torch.randn(4)]
    return {
        PLAIN: Variant(function, arguments, context=without_torchop),
        OPS: Variant(function, arguments),
    }


class _Callable:
    def __call__(self) -> None: ...


# --------------------------------------------------------------------------------------------------
# Limits


def _ratio(row: str, base: str, most: float, variant: str = HANDLE) -> Limit:
    return Limit(TABLE, row, variant, most, base)


LIMITS = (
    _ratio(FOURTEEN.title, PLAIN, 1.12),
    _ratio(FOURTEEN.title, PLAIN, 1.20, OPS),
    _ratio(FOURTEEN.title, CUSTOM_OP, 1 / 9),
    _ratio(FOURTEEN.title, CPP, 1.0),
    _ratio(INFERENCE.title, PLAIN, 1.12),
    _ratio(TYPED.title, PLAIN, 1.15),
    *(_ratio(case.title, PLAIN, 1.15) for case in (MUTATION, MUTATION_OF_3, IN_PLACE, OUT)),
    _ratio(GRAD_1.title, PLAIN, 1.2),
    _ratio(PARAMETER.title, PLAIN, 1.25),
    _ratio(GRAD.title, PLAIN, 2.42),
    _ratio(GRAD_NON_LEAVES.title, PLAIN, 1.79),
    _ratio(SAVES.title, WRITTEN, 0.5),
    _ratio(TRAINING.title, WRITTEN, 0.85),
    *(_ratio(case.title, CPP, 1.0) for case in (GRAD, TRAINING)),
    *(_ratio(case.title, LOW_LEVEL, 0.7) for case in (PROFILED, IN_MODE, SUBCLASS)),
    _ratio(GRAPH, CUSTOM_OP, 1 / 1.5),
    # The cost of entering a native call, of flattening a dataclass, and of recognizing an operator
    # whose calls are not native.
    Limit(TABLE, ONE.title, HANDLE, 0.10, PLAIN, difference=True),
    Limit(TABLE, DATACLASS, HANDLE, 1.5, PLAIN, difference=True),
    Limit(TABLE, PYTORCH, OPS, 0.02, PLAIN, difference=True),
)

BENCHMARK = Benchmark(
    name="calls",
    units={TABLE: "us"},
    parts={"calls": measure},
    settings={"processes": 5, "rounds": 40},
    limits=LIMITS,
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
