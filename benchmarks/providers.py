"""Measure the selection between kernels of several providers.

Every variant calls the same kernel, `torch.empty_like`:

- one kernel: an operator without providers.
- by priority: two providers, the first of which supports every call.
- supports: the first provider has a `supports` function, and its result for this call is cached.
- in a block: the same, inside `with torchop.priority(...)`.
- Python: a kernel that selects as inference engines do, with a list of providers in the order of
  priority and a call of `supports_args` for each.
- Python table: the same behind a dictionary of shapes and dtypes.

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
    """A provider of an inference engine."""

    def __init__(self, function: Function, supports_args: Callable[[Tensor, Tensor], bool]) -> None:
        self.function, self.supports_args = function, supports_args
        self.supported = True


def selection() -> Function:
    """Return a kernel that selects as vLLM IR does: the first provider that supports the call."""
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
    """Return the same with a cache of selections, as autotuners have."""
    selected: dict[Any, Function] = {}
    select = selection()

    def look_up(x: Tensor, y: Tensor) -> Tensor:
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (x, y))
        return selected.setdefault(key, select)(x, y)

    return look_up


def measure(settings: Settings) -> Tables:
    """Define the operators and measure them."""

    def define(name: str, function: Function = kernel) -> Any:
        return torchop.custom_op(f"bench::{name}", function, mutates_args=(), schema=SCHEMA)

    operators = {name: define(f"op{place}") for place, name in enumerate((ONE, PRIORITY, SUPPORTS))}
    for name, supports in ((PRIORITY, None), (SUPPORTS, supports_matrices)):
        op = operators[name]
        # Each kernel has its own code object, because CPython specializes code by its callers.
        op.register_kernel(
            "cpu", lambda x, y: torch.empty_like(x), provider="fast", supports=supports
        )
        op.register_kernel("cpu", lambda x, y: torch.empty_like(x), provider="other")
        op.set_priority(["fast", "other"])
    operators[PYTHON] = define("python", selection())
    operators[PYTHON_TABLE] = define("table", table())
    arguments, rounds = (torch.zeros(4, 4), torch.zeros(4, 4)), settings["rounds"]
    with torch.no_grad():  # otherwise outputs record that the operator has no formula
        calls = {name: Variant(op, arguments) for name, op in operators.items()}
        micros = harness.measure(calls, rounds)
        # Last, because the first block of a process changes the plan of the operator.
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
