"""Measure how long it takes to register operators, and to use the first operator of a process.

The variants are:

- torchop: `torchop.custom_op`.
- custom_op: `torch.library.custom_op`.
- define + impl: `torch.library.define` and `torch.library.impl` with a schema that is written by
  hand. Fake kernels and formulas are registered with `register_fake` and `register_autograd` of
  `torch.library`.

Packages register hundreds of operators when they are imported. So "time" and "memory" are averages
over many operators, which have one to three tensor arguments. "memory" is the growth of the
process's memory, not counting the operators' Python functions. "first use" measures the first
definition, call and training step of a process. It shows that the first call to an operator of
`torch.library.custom_op` imports torch._dynamo.

torchop is imported inside of functions, because we also measure the import.
"""

from __future__ import annotations

import functools
import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import harness
from harness import Benchmark, Limit, Settings, Tables

TORCHOP, CUSTOM_OP, LOW_LEVEL = VARIANTS = ("torchop", "custom_op", "define + impl")
KERNEL, RULES, CALLED = CONTENTS = ("kernel", "kernel, fake kernel, formula", "kernel, 1 call")
IMPORT, FIRST, MODULES, DYNAMO = "import", "first use", "imports", "imports of torch._dynamo"
TIME, MEMORY = "time", "memory"


# --------------------------------------------------------------------------------------------------
# The operators


class Source(NamedTuple):
    schema: str
    args: tuple[Any, ...]
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    setup_context: Callable[..., None]
    backward: Callable[..., Any]


def scale() -> Source:
    def kernel(x: Tensor, factor: float = 1.0) -> Tensor:
        return x * factor

    def fake(x: Tensor, factor: float = 1.0) -> Tensor:
        return torch.empty_like(x)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None

    schema = "(Tensor x, float factor=1.0) -> Tensor"
    return Source(schema, (torch.ones(2), 2.0), kernel, fake, setup_context, backward)


def affine() -> Source:
    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:
        return x * weight

    def fake(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:
        return torch.empty_like(x)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x, None, None

    schema = "(Tensor x, Tensor weight, Tensor? bias, SymInt[] sizes) -> Tensor"
    args = (torch.ones(2), torch.ones(2), None, [2])
    return Source(schema, args, kernel, fake, setup_context, backward)


def attention() -> Source:
    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        return q * k, v.clone()

    def fake(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(v)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    def backward(ctx: Any, grad: Tensor, grad_v: Tensor) -> Any:
        q, k = ctx.saved_tensors
        return grad * k, grad * q, grad_v, None

    schema = "(Tensor q, Tensor k, Tensor v, bool causal=False) -> (Tensor, Tensor)"
    args = (torch.ones(2), torch.ones(2), torch.ones(2))
    return Source(schema, args, kernel, fake, setup_context, backward)


KINDS = (scale, affine, attention)


class Registrar:
    def __init__(self, variant: str) -> None:
        self.custom_op: Callable[..., Any] | None = None
        if variant == TORCHOP:
            import torchop

            self.custom_op = torchop.custom_op
        elif variant == CUSTOM_OP:
            self.custom_op = torch.library.custom_op

    def define(self, name: str, source: Source) -> Any:
        """Define an operator. Return the handle, or the name if the variant has no handles."""
        if self.custom_op is not None:
            return self.custom_op(f"bench::{name}", source.kernel, mutates_args=())
        torch.library.define(f"bench::{name}", source.schema)
        torch.library.impl(f"bench::{name}", "cpu", source.kernel)
        return f"bench::{name}"

    def add_rules(self, op: Any, source: Source) -> None:
        if self.custom_op is not None:
            op.register_fake(source.fake)
            op.register_autograd(source.backward, setup_context=source.setup_context)
        else:
            torch.library.register_fake(op, source.fake)
            torch.library.register_autograd(op, source.backward, setup_context=source.setup_context)

    def call(self, op: Any, args: tuple[Any, ...]) -> Any:
        if isinstance(op, str):
            op = getattr(torch.ops.bench, op.removeprefix("bench::"))
        return op(*args)


# --------------------------------------------------------------------------------------------------
# The parts


def import_torchop(settings: Settings) -> Tables:
    _freeze()
    start = time.thread_time()
    import torchop  # noqa: F401  # the import is measured

    return {IMPORT: {"import torchop": {TORCHOP: (time.thread_time() - start) * 1e3}}}


def first_use(settings: Settings, variant: str) -> Tables:
    """Time the first definition, call and training step of a process.

    Also counts the modules that they import.
    """
    registrar = Registrar(variant)
    source = scale()
    x = torch.ones(2, requires_grad=True)
    op = None

    def define() -> None:
        nonlocal op
        op = registrar.define("first", source)

    def call() -> None:
        registrar.call(op, source.args)

    def train() -> None:
        registrar.add_rules(op, source)
        registrar.call(op, (x, 2.0)).sum().backward()

    tables: Tables = {FIRST: {}, MODULES: {}, DYNAMO: {}}
    for step, function in (("definition", define), ("call", call), ("training step", train)):
        _freeze()
        before = set(sys.modules)
        start = time.thread_time()
        function()
        milliseconds = (time.thread_time() - start) * 1e3
        imported = set(sys.modules) - before
        tables[FIRST][step] = {variant: milliseconds}
        tables[MODULES][step] = {variant: len(imported)}
        dynamo = sum(module.startswith("torch._dynamo") for module in imported)
        tables[DYNAMO][step] = {variant: dynamo}
    return tables


def many(settings: Settings, variant: str, contents: str) -> Tables:
    count = settings["operators"]
    registrar = Registrar(variant)
    sources = [KINDS[index % len(KINDS)]() for index in range(count)]
    # Do not measure the first operators of the process, because they import modules and fill
    # caches.
    warm_up = [(f"warm_up_{i}", kind()) for i, kind in enumerate(KINDS)]
    handles = register(registrar, contents, warm_up)
    registrar.call(handles[0], warm_up[0][1].args)
    named = [(f"op_{index}", source) for index, source in enumerate(sources)]
    _freeze()
    kilobytes = resident_kilobytes()
    start = time.thread_time()
    operators = register(registrar, contents, named)
    seconds = time.thread_time() - start
    gc.collect()
    kilobytes = resident_kilobytes() - kilobytes
    assert len(operators) == count
    return {
        TIME: {contents: {variant: seconds / count * 1e6}},
        MEMORY: {contents: {variant: kilobytes / count}},
    }


def register(registrar: Registrar, contents: str, named: list[tuple[str, Source]]) -> list[Any]:
    handles = []
    for name, source in named:
        op = registrar.define(name, source)
        if contents == RULES:
            registrar.add_rules(op, source)
        if contents == CALLED:
            registrar.call(op, source.args)
        handles.append(op)
    return handles


def _freeze() -> None:
    """Collect garbage before a measurement. Otherwise the measurement might include it."""
    gc.collect()
    gc.freeze()


def resident_kilobytes() -> float:
    """Return the memory of this process in KB, or the peak memory on systems without /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform == "darwin" else peak


BENCHMARK = Benchmark(
    name="registration",
    units={IMPORT: "ms", FIRST: "ms", MODULES: "modules", DYNAMO: "modules"}
    | {TIME: "us", MEMORY: "KB"},
    parts={"import": import_torchop}
    | {f"first, {name}": functools.partial(first_use, variant=name) for name in VARIANTS}
    | {
        f"{contents}, {name}": functools.partial(many, variant=name, contents=contents)
        for contents in CONTENTS
        for name in VARIANTS
    },
    settings={"processes": 5, "operators": 1000},
    environment={},  # the import must not wait for the extension
    limits=(
        Limit(TIME, KERNEL, TORCHOP, 0.4, CUSTOM_OP),
        Limit(TIME, KERNEL, TORCHOP, 4.5, LOW_LEVEL),
        Limit(MEMORY, KERNEL, TORCHOP, 16),
        Limit(FIRST, "definition", TORCHOP, 2),
        Limit(FIRST, "training step", TORCHOP, 5),
        Limit(IMPORT, "import torchop", TORCHOP, 50),
        *(Limit(DYNAMO, step, TORCHOP, 0) for step in ("definition", "call", "training step")),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
