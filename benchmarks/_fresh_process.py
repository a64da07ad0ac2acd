"""Make one measurement for `registration.py` in this process, and print it as JSON.

    python _fresh_process.py import
    python _fresh_process.py first ROUTE
    python _fresh_process.py many ROUTE CONTENTS COUNT

This file imports little besides torch, because an import made here would be missing from the
measured time of `import torchop` and of the first definition.
"""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TORCHOP, CUSTOM_OP, LOW_LEVEL = ROUTES = ("torchop", "custom_op", "define + impl")
KERNEL_ONLY, WITH_RULES, CALLED = CONTENTS = ("kernel", "kernel, fake, formula", "kernel, 1 call")


# --------------------------------------------------------------------------------------------------
# The operators


class Source(NamedTuple):
    """The functions and arguments of one operator."""

    schema: str
    args: tuple[Any, ...]
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    setup_context: Callable[..., None]
    backward: Callable[..., Any]


def _scale() -> Source:
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


def _affine() -> Source:
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


def _attention() -> Source:
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


KINDS = (_scale, _affine, _attention)


class Registrar:
    """Register operators by one route, and call them."""

    def __init__(self, route: str) -> None:
        self.custom_op: Callable[..., Any] | None = None
        if route == TORCHOP:
            import torchop

            self.custom_op = torchop.custom_op
        elif route == CUSTOM_OP:
            self.custom_op = torch.library.custom_op

    def define(self, name: str, source: Source) -> Any:
        """Define an operator; return the handle, or the name for the low-level API."""
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
# The measurements


def import_torchop() -> dict[str, float]:
    """Time `import torchop` after `import torch`."""
    gc.collect()
    gc.freeze()  # otherwise a collection due after `import torch` would be part of the time
    start = time.perf_counter()
    import torchop  # noqa: F401  # importing it is the measurement

    return {"milliseconds": (time.perf_counter() - start) * 1e3}


def first_use(route: str) -> dict[str, dict[str, float]]:
    """Time a process's first definition, call and training step, and count imported modules."""
    registrar = Registrar(route)
    source = _scale()
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

    results = {}
    for name, step in (("definition", define), ("call", call), ("training step", train)):
        gc.collect()
        gc.freeze()
        before = set(sys.modules)
        start = time.perf_counter()
        step()
        milliseconds = (time.perf_counter() - start) * 1e3
        imported = set(sys.modules) - before
        results[name] = {
            "milliseconds": milliseconds,
            "modules": len(imported),
            "dynamo_modules": sum(module.startswith("torch._dynamo") for module in imported),
        }
    return results


def many(route: str, contents: str, count: int) -> dict[str, float]:
    """Register many operators; return the microseconds and KB of memory per operator."""
    registrar = Registrar(route)
    # Create the user's functions before the measurement, and warm up: the first operators of a
    # process pay for imports and caches, which `first_use` measures.
    sources = [KINDS[index % len(KINDS)]() for index in range(count)]
    warm_up = [(f"warm_up_{i}", kind()) for i, kind in enumerate(KINDS)]
    handles = _register(registrar, contents, warm_up)
    # After the first call, defining an operator also sets up native calls.
    registrar.call(handles[0], warm_up[0][1].args)
    named = [(f"op_{index}", source) for index, source in enumerate(sources)]
    gc.collect()
    gc.freeze()  # otherwise collections would traverse torch's objects again
    kilobytes = _resident_kilobytes()
    start = time.perf_counter()
    kept = _register(registrar, contents, named)
    seconds = time.perf_counter() - start
    gc.collect()
    kilobytes = _resident_kilobytes() - kilobytes
    assert len(kept) == count
    return {"microseconds": seconds / count * 1e6, "kilobytes": kilobytes / count}


def _register(registrar: Registrar, contents: str, named: list[tuple[str, Source]]) -> list[Any]:
    handles = []
    for name, source in named:
        op = registrar.define(name, source)
        if contents == WITH_RULES:
            registrar.add_rules(op, source)
        if contents == CALLED:
            registrar.call(op, source.args)
        handles.append(op)
    return handles


def _resident_kilobytes() -> float:
    """Return the resident memory of this process, or the peak if only that is available."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform == "darwin" else peak


def main(what: str, *arguments: str) -> None:
    if what == "import":
        result: Any = import_torchop()
    elif what == "first":
        result = first_use(*arguments)
    else:
        route, contents, count = arguments
        result = many(route, contents, int(count))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
