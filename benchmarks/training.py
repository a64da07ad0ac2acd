"""Measure memory and time of training with a derived formula.

With a derived formula, the backward runs the forward again and lets autograd differentiate it. Each
row of the tables is a function whose inputs take 250 KB each. The variants are:

- plain call: the function itself, differentiated by autograd.
- derived: an operator with `derive_autograd()`.
- checkpoint: the function in `torch.utils.checkpoint`.
- compiled: the operator, compiled by `torch.compile` with the backend `aot_eager`.

"memory" is the total size of all storages that autograd saves. A derived formula saves only the
inputs, like a checkpoint. A compiled graph also saves the state of the random number generator,
which takes 5 KB. All three run the forward again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import harness
import torchop
from harness import Benchmark, Limit, Settings, Tables, Variant

PLAIN, DERIVED, CHECKPOINT, COMPILED = "plain call", "derived", "checkpoint", "compiled"
MEMORY, TIME = "memory", "time"
SIDE = 250  # number of rows and columns of the square matrices


def elementwise(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x.sin()
    return x


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT, -1) @ value


def dropout(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(torch.nn.functional.gelu(x) * x)


ROWS = {elementwise: 1, attention: 3, dropout: 1}  # the number of inputs of each function


def variants(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    op = torchop.custom_op(f"bench_training::{function.__name__}", function, mutates_args=())
    op.register_fake(lambda *tensors: torch.empty_like(tensors[0]))
    op.derive_autograd()
    return {
        PLAIN: function,
        DERIVED: op,
        CHECKPOINT: lambda *tensors: checkpoint(function, *tensors, use_reentrant=False),
        COMPILED: torch.compile(op, fullgraph=True, backend="aot_eager"),
    }


@contextmanager
def saved() -> Iterator[dict[int, int]]:
    """Yield a dict that receives the size of each storage that autograd saves in the block.

    The keys are the addresses of the storages.
    """
    sizes: dict[int, int] = {}
    tensors = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)  # keep it alive, or another storage might get the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def kilobytes(function: Callable[..., Any], inputs: list[Tensor]) -> float:
    function(*inputs)  # the first call may compile
    with saved() as sizes:
        function(*inputs)
    if not sizes:  # a checkpoint saves the inputs itself, without calling these hooks
        return sum(tensor.nbytes for tensor in inputs) / 1000
    return sum(sizes.values()) / 1000


def measure(settings: Settings) -> Tables:
    tables: Tables = {MEMORY: {}, TIME: {}}
    for function, count in ROWS.items():
        inputs = [torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(count)]

        def step(variant: Callable[..., Any], inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(variant(*inputs).sum(), inputs)

        found = variants(function)
        calls = {name: Variant(step, (variant,)) for name, variant in found.items()}
        row = function.__name__
        tables[TIME][row] = harness.measure(calls, settings["rounds"])
        tables[MEMORY][row] = {name: kilobytes(way, inputs) for name, way in found.items()}
    return tables


BENCHMARK = Benchmark(
    name="training",
    units={MEMORY: "KB", TIME: "us"},
    parts={"training": measure},
    settings={"processes": 3, "rounds": 5},
    # The memory must not exceed the size of the inputs, plus 6 KB for the generator's state.
    limits=tuple(
        Limit(MEMORY, function.__name__, variant, count * SIDE * SIDE * 4 / 1000 + 6)
        for function, count in ROWS.items()
        for variant in (DERIVED, COMPILED)
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
