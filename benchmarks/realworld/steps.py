"""Measure how much of the time of a realistic step is call overhead, before and after `accelerate`.

`nox -s realworld` runs this script. The steps run in eager mode on the CPU, and call the operators
through the packages' own modules:

- decoding a token with four layers that have 4-bit weights (bitsandbytes);
- a step of AdamW for many small parameters, with 32-bit and with 8-bit states (bitsandbytes);
- computing a neighbour list and an L-BFGS step for a few atoms (nvalchemi-toolkit-ops).

The overhead is the additional time compared to the same step with direct calls to the kernels. To
measure that step, each operator's function in `torch.ops` is replaced by the kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchop
from torchop._compat import torch_ops
from torchop._native.table import calls as table

ROUNDS = 101
PATTERNS = ("bitsandbytes::*", "nvalchemiops::*")
WIDTH, LAYERS = 64, 4
PARAMETERS, SIZE = 200, 256
ATOMS, CUTOFF, SIDE = 24, 2.5, 6.0

Step = Callable[[], object]


class Milliseconds(NamedTuple):
    """The time of a step before acceleration, after acceleration, and with direct kernel calls."""

    before: float
    after: float
    kernels: float

    def __str__(self) -> str:
        before, after = (max(0.0, 1 - self.kernels / took) for took in self[:2])
        return (
            "".join(f"{took:9.3f}" for took in self) + f"{before:15.0%} before,{after:4.0%} after"
        )


class Layer(nn.Module):
    """A decoder layer for one token. It has attention to earlier tokens and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        linear = importlib.import_module("bitsandbytes.nn").LinearNF4

        def made() -> nn.Module:
            return linear(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32)

        self.query, self.key, self.value, self.out = (made() for _ in range(4))
        self.gate, self.up, self.down = (made() for _ in range(3))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = torch.cat((keys, self.key(x))), torch.cat((values, self.value(x)))
        weights = torch.softmax(self.query(x) @ keys.T / WIDTH**0.5, -1)
        x = x + self.out(weights @ values)
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def decoder_step() -> Step:
    """Return a step that decodes the eighth token of a sequence."""
    layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to("cpu")  # `to` quantizes the weights
    assert {parameter.dtype for parameter in layers.parameters()} == {torch.uint8}
    x, keys, values = torch.randn(1, WIDTH), torch.randn(7, WIDTH), torch.randn(7, WIDTH)

    @torch.no_grad()
    def step() -> Tensor:
        hidden = x
        for layer in layers:
            hidden = layer(hidden, keys, values)
        return hidden

    return step


def optimizer_step(name: str, **options: int) -> Step:
    parameters = [nn.Parameter(torch.randn(SIZE)) for _ in range(PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.randn(SIZE)
    optimizer = getattr(importlib.import_module("bitsandbytes.optim"), name)
    return optimizer(parameters, lr=1e-3, **options).step


def relaxation_step() -> Step:
    """Return a step that computes a neighbour list, and moves the atoms and the cell by L-BFGS."""
    lists = importlib.import_module("nvalchemiops.torch.neighbors.cell_list")
    lbfgs = importlib.import_module("nvalchemiops.torch.lbfgs")
    start, forces, stress = torch.rand(ATOMS, 3) * SIDE, torch.randn(ATOMS, 3), torch.randn(1, 3, 3)
    cell, periodic = torch.eye(3)[None] * SIDE, torch.ones(1, 3, dtype=torch.bool)
    molecule, ends = torch.zeros(ATOMS, dtype=torch.int32), torch.tensor([0, ATOMS])
    state = lbfgs.lbfgs_prepare_state(ATOMS + 2, 1, dtype=torch.float32)
    cells = lbfgs.lbfgs_prepare_cell_state(ends, cell, dtype=torch.float32)

    def step() -> None:
        positions, moved = start.clone(), cell.clone()
        lists.cell_list(positions, CUTOFF, cell, periodic, max_neighbors=64)
        lbfgs.lbfgs_step_coord_cell(positions, moved, forces, stress, state, cells, molecule)

    return step


STEPS: dict[str, Callable[[], Step]] = {
    "4-bit decoder": decoder_step,
    # Do not use Adam. Its weight decay is the int 0, which the dispatcher must convert to a float,
    # so the call would not be native.
    "AdamW": lambda: optimizer_step("AdamW"),
    "8-bit AdamW": lambda: optimizer_step("AdamW8bit", min_8bit_size=SIZE),
    "relaxation": relaxation_step,
}


def measure(step: Step) -> Milliseconds:
    for _ in range(3):
        step()
    times: list[tuple[float, float, float]] = []
    with torchop.accelerate(*PATTERNS):
        kernels = kernels_of(step)
        for _ in range(ROUNDS):
            with torchop.native.disabled():
                before = timed(step)
            after = timed(step)
            with replaced(kernels):
                times.append((before, after, timed(step)))
    return Milliseconds(*(statistics.median(column) for column in zip(*times, strict=True)))


def kernels_of(step: Step) -> dict[Any, Callable[..., Any]]:
    """Return the kernels of all operators that a step calls, including calls inside of kernels."""
    kernels: dict[Any, Callable[..., Any]] = {}

    def noting(known: table.TableCalls, overload: Any) -> Callable[..., Any]:
        function = overload._op

        def call(*args: Any, **kwargs: Any) -> Any:
            kernel = known.entry.explain(*args, **kwargs)[2]
            assert kernel is not None, f"a call of {overload} is not native"
            kernels[overload] = kernel
            return function(*args, **kwargs)

        return call

    adopted = {torch_ops.lookup_overload(*n): calls for n, calls in table.accelerated.items()}
    with replaced({overload: noting(known, overload) for overload, known in adopted.items()}):
        step()
    return kernels


@contextlib.contextmanager
def replaced(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """In a block, replace the functions that the given overloads call.

    For a default overload, also replaces the function of the packet.
    """
    holders = []
    for overload, function in functions.items():
        holders.append((overload, overload._op, function))
        if overload._overloadname == "default":
            packet = overload._overloadpacket
            holders.append((packet, packet._op, function))
    for holder, _, function in holders:
        holder._op = function
    try:
        yield
    finally:
        for holder, original, _ in reversed(holders):
            holder._op = original


def timed(step: Step) -> float:
    start = time.thread_time()
    step()
    return (time.thread_time() - start) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}")
    print(f"{'step':16}{'before':>9}{'after':>9}{'kernels':>9}  (ms)  share of call overhead")
    for name, make in STEPS.items():
        print(f"{name:16}{measure(make())}", flush=True)


if __name__ == "__main__":
    main()
