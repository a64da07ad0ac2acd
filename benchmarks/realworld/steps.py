"""What share of a whole step is spent on the way to kernels, before and after `accelerate`?

Two eager workloads of bitsandbytes on the CPU: a token through a decoder of four layers whose
weights have 4 bits, and a step of its Adam over many small parameters. `make realworld` runs this.
The time of a step that spends nothing on the way is that of the same step with each operator's
function in `torch.ops` replaced by its kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import torchop
from torchop._compat import torch_ops
from torchop._native import foreign

ROUNDS = 61
PATTERN = "bitsandbytes::*"
WIDTH, LAYERS, PARAMETERS = 64, 4, 200


class Layer(nn.Module):
    """A layer of a decoder, for one token: attention to those before it, and a gate."""

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


def decoder_step() -> Callable[[], object]:
    """One token through the decoder, after seven others."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to("cpu")
    x, keys, values = torch.randn(1, WIDTH), torch.randn(7, WIDTH), torch.randn(7, WIDTH)

    @torch.no_grad()
    def step() -> Tensor:
        hidden = x
        for layer in layers:
            hidden = layer(hidden, keys, values)
        return hidden

    step()  # quantises the weights
    return step


def optimizer_step() -> Callable[[], object]:
    """Adam over many small parameters, by the operator that updates one of them."""
    update = torch.ops.bitsandbytes.optimizer_update_32bit.default
    torch.manual_seed(0)
    states = [tuple(torch.rand(16) for _ in range(4)) for _ in range(PARAMETERS)]

    @torch.no_grad()
    def step() -> None:
        for gradient, parameter, first, second in states:
            numbers = (0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.0, 3, 1e-3, 1.0)
            update("adam", gradient, parameter, first, second, None, *numbers, False)

    return step


@contextlib.contextmanager
def kernels_only(step: Callable[[], object]) -> Iterator[None]:
    """Replaces what `torch.ops` calls by the kernel that a native call of it would run."""
    recorded = torchop.record(PATTERN)
    with recorded:
        step()
    replaced = []
    for name in foreign.adopted():
        known = foreign.find(name)
        overload = torch_ops.lookup_overload(*name)
        example = recorded[str(name)][0][0].example() if str(name) in recorded else None
        if known is None or example is None:
            continue
        kernel = known.entry.explain(*example[0], **example[1])[2]
        if kernel is not None:
            replaced.append((overload, overload._op))
            overload._op = kernel
    try:
        yield
    finally:
        for overload, function in replaced:
            overload._op = function


def measure(step: Callable[[], object]) -> tuple[float, float, float]:
    """Milliseconds of a step before, after, and with nothing but the kernels."""
    times: list[tuple[float, float, float]] = []
    with torchop.accelerate(PATTERN):
        for _ in range(ROUNDS):
            with torchop.native.disabled():
                before = timed(step)
            after = timed(step)
            times.append((before, after, 0.0))
        with kernels_only(step):
            times = [(before, after, timed(step)) for before, after, _ in times]
    before, after, kernels = (statistics.median(column) for column in zip(*times, strict=True))
    return before, after, kernels


def timed(step: Callable[[], object]) -> float:
    start = time.thread_time()
    step()
    return (time.thread_time() - start) * 1e3


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    importlib.import_module("bitsandbytes")
    print(f"{'step':24}{'before':>9}{'after':>9}{'kernels':>9}  (ms)  share on the way to kernels")
    for name, make in (("4-bit decoder", decoder_step), ("optimizer", optimizer_step)):
        before, after, kernels = measure(make())
        shares = f"{1 - kernels / before:.0%} before, {max(0.0, 1 - kernels / after):.0%} after"
        print(f"{name:24}{before:9.3f}{after:9.3f}{kernels:9.3f}        {shares}")


if __name__ == "__main__":
    main()
