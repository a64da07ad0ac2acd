"""Measure how long it takes to select between the kernels of several providers.

All variants call the same kernel, `torch.empty_like`:

- one kernel: an operator without providers.
- by priority: an operator with two providers. The first one supports every call.
- supports: the first provider has a function `supports`, whose result for this call is cached.
- in a block: like "supports", but inside a `with torchop.priority(...)` block.
- Python: a kernel that selects in Python, as inference engines do. It tries a list of providers in
  the order of their priority, and calls `supports_args` of each.
- Python table: like "Python", but the selections are cached in a dictionary, under the arguments'
  shapes and dtypes.

"selection" is the time of a call minus the time of the variant "one kernel".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import harness
import torchop
from harness import Benchmark, Limit, Settings, Tables, Variant

CALLS, SELECTION, ROW = "calls", "selection", "2 tensors"
ONE, PRIORITY, SUPPORTS, BLOCK = "one kernel", "by priority", "supports", "in a block"
PYTHON, PYTHON_TABLE = "Python", "Python table"
SCHEMA = "(Tensor x, Tensor y) -> Tensor"

Function = Callable[[Tensor, Tensor], Tensor]


def kernel(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def supports_matrices(x: Tensor, y: Tensor) -> bool:
    return x.dim() == 2 and x.dtype == y.dtype


class Implementation:
    """A provider as in an inference engine: a kernel and a function that checks arguments."""

    def __init__(self, function: Function, supports_args: Callable[[Tensor, Tensor], bool]) -> None:
        self.function, self.supports_args = function, supports_args
        self.supported = True


def selection() -> Function:
    """Return a kernel that calls the first provider that supports a call, as vLLM IR does."""
    implementations = {"fast": Implementation(kernel, supports_matrices)}
    implementations["native"] = Implementation(kernel, lambda x, y: True)
    priority = ["fast", "native"]

    def select(x: Tensor, y: Tensor) -> Tensor:
        for name in priority:
            implementation = implementations[name]
            if implementation.supported and implementation.supports_args(x, y):
                return implementation.function(x, y)
        raise NotImplementedError

    return select


def table() -> Function:
    """Return a kernel that caches the selections of `selection`, as autotuners do."""
    selected: dict[Any, Function] = {}
    select = selection()

    def look_up(x: Tensor, y: Tensor) -> Tensor:
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (x, y))
        return selected.setdefault(key, select)(x, y)

    return look_up


def measure(settings: Settings) -> Tables:
    def define(name: str, function: Function = kernel) -> Any:
        return torchop.custom_op(f"bench::{name}", function, mutates_args=(), schema=SCHEMA)

    operators = {name: define(f"op{place}") for place, name in enumerate((ONE, PRIORITY, SUPPORTS))}
    for name, supports in ((PRIORITY, None), (SUPPORTS, supports_matrices)):
        op = operators[name]
        # Give each kernel its own code object, because CPython specializes code objects for the
        # calls that they get.
        op.register_kernel(
            "cpu", lambda x, y: torch.empty_like(x), provider="fast", supports=supports
        )
        op.register_kernel("cpu", lambda x, y: torch.empty_like(x), provider="other")
        op.set_priority(["fast", "other"])
    operators[PYTHON] = define("python", selection())
    operators[PYTHON_TABLE] = define("table", table())
    arguments, rounds = (torch.zeros(4, 4), torch.zeros(4, 4)), settings["rounds"]
    with torch.no_grad():  # otherwise each call creates a node that reports the missing formula
        calls = {name: Variant(op, arguments) for name, op in operators.items()}
        micros = harness.measure(calls, rounds)
        # Measure this last, because once a process has used a `priority` block, each call checks
        # for open blocks, so calls are slower.
        with torchop.priority({"bench::op2": ["fast"]}):
            pair = {ONE: calls[ONE], BLOCK: calls[SUPPORTS]}
            inside = harness.measure(pair, rounds)
    micros[BLOCK] = micros[ONE] + inside[BLOCK] - inside[ONE]
    nanos = {name: 1e3 * number for name, number in micros.items()}
    added = {name: number - nanos[ONE] for name, number in nanos.items() if name != ONE}
    return {CALLS: {ROW: nanos}, SELECTION: {ROW: added}}


BENCHMARK = Benchmark(
    name="providers",
    units={CALLS: "ns", SELECTION: "ns"},
    parts={"calls": measure},
    settings={"processes": 5, "rounds": 100},
    limits=(
        Limit(SELECTION, ROW, PRIORITY, 20),
        Limit(SELECTION, ROW, SUPPORTS, 150),
        Limit(SELECTION, ROW, SUPPORTS, 0.5, PYTHON_TABLE),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
