"""Measure the memory that derived formulas save between forward and backward.

Each row is a function with inputs of 250 KB. Each column is a way to train through it:

- plain call: the function itself, differentiated by PyTorch.
- derived: an operator with `derive_autograd()`.
- checkpoint: the plain call inside `torch.utils.checkpoint`.
- compiled: the operator, compiled with `aot_eager`.

The numbers are kilobytes saved for backward, counting each storage once, and the time of forward
and backward relative to the plain call.

Results: a derived formula saves only the inputs, like a checkpoint. A compiled graph also saves the
5 KB of the random number generator's state. Recomputing takes the time of another forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import _harness
import torchop
from _harness import Bar, Call

PLAIN, DERIVED, CHECKPOINT, COMPILED = ROUTES = (
    "plain call",
    "derived",
    "checkpoint",
    "compiled",
)


def elementwise(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x.sin()
    return x


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT, -1) @ value


def with_dropout(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(torch.nn.functional.gelu(x) * x)


ROWS = {elementwise: 1, attention: 3, with_dropout: 1}


class Measured(NamedTuple):
    """The memory saved for backward, and the time of forward and backward."""

    kilobytes: float
    microseconds: float


def routes(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Define an operator for a function, and return all ways to train through it."""
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
def held() -> Iterator[dict[int, int]]:
    """Yield the sizes of the storages that autograd saves in the block."""
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # otherwise another tensor could reuse the address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def kilobytes(function: Callable[..., Any], inputs: list[Tensor]) -> float:
    """Return the kilobytes that autograd holds after a call, including inputs of a checkpoint."""
    function(*inputs)  # may compile
    with held() as sizes:
        function(*inputs)
    if not sizes:  # a checkpoint packs before the hooks
        return sum(tensor.nbytes for tensor in inputs) / 1000
    return sum(sizes.values()) / 1000


def collect(rounds: int, side: int) -> dict[str, dict[str, Measured]]:
    """Measure every function by every route."""
    results: dict[str, dict[str, Measured]] = {}
    for function, count in ROWS.items():
        inputs = [torch.rand(side, side, requires_grad=True) for _ in range(count)]
        ways = routes(function)

        def step(way: Callable[..., Any], inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(way(*inputs).sum(), inputs)

        times = _harness.measure({name: Call(step, (way,)) for name, way in ways.items()}, rounds)
        results[function.__name__] = {
            name: Measured(kilobytes(way, inputs), times[name].median) for name, way in ways.items()
        }
    return results


def bars(results: dict[str, dict[str, Measured]], side: int) -> list[Bar]:
    """Return the limits for the memory, which does not depend on the machine."""
    checked = []
    for (function, count), row in zip(ROWS.items(), results.values(), strict=True):
        inputs = count * side * side * 4 / 1000
        name = function.__name__
        # 6 KB for the state of the random number generator, saved by all graphs and by dropout.
        checked += [
            Bar(f"{name}: saved by derived", row[DERIVED].kilobytes, inputs + 6, " KB"),
            Bar(f"{name}: saved when compiled", row[COMPILED].kilobytes, inputs + 6, " KB"),
        ]
    return checked


def table(results: dict[str, dict[str, Measured]]) -> Any:
    result = _harness.table("Memory saved for backward, and time", "function", *ROUTES)
    for name, row in results.items():
        cells = [
            f"{m.kilobytes:.0f} KB  {m.microseconds / row[PLAIN].microseconds:.2f}x"
            for m in row.values()
        ]
        result.add_row(name, *cells)
    return result


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed blocks per route")
    parser.add_argument("--side", type=int, default=250, help="side of the square input matrices")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = _harness.console()
    results = collect(options.rounds, options.side)
    environment = _harness.environment()
    console.print(f"torch {environment['torch']}, Python {environment['python']}; medians")
    console.print(table(results))
    checked = bars(results, options.side)
    _harness.print_bars(console, checked)
    rows = {name: {r: m._asdict() for r, m in row.items()} for name, row in results.items()}
    _harness.write_json(options.json, {"training": rows, "bars": _harness.bars_as_json(checked)})
    return 0 if all(bar.passed for bar in checked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
