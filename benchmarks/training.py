"""What does a formula that is derived keep in memory between forward and backward?

Every row is one function, with inputs of 250 KB each; every column is one way to train
through it:

- plain call: the function itself, differentiated by PyTorch.
- derived: an operator of it, with `derive_autograd()`.
- checkpoint: the plain call inside `torch.utils.checkpoint`.
- compiled: the operator in a graph of `torch.compile` with `aot_eager`.

The numbers are the bytes that autograd holds on to, each storage once, in thousands; the time of
forward and backward together is beside them, in multiples of that of the plain call.

Take-away: a derived formula keeps the inputs and nothing else, like a checkpoint; a compiled graph
also keeps the 5 KB of the random number generator. Recomputing takes the time of another forward.
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
    """What training by one route holds, and how long it takes."""

    kilobytes: float
    microseconds: float


def routes(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The ways to train through a function."""
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
    """Yields the sizes of the storages that autograd saves inside the block."""
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no other has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def kilobytes(function: Callable[..., Any], inputs: list[Tensor]) -> float:
    """What autograd holds on to after a call, a checkpoint's own inputs included."""
    function(*inputs)  # compiles, if that is to be done
    with held() as sizes:
        function(*inputs)
    if not sizes:  # a checkpoint packs before the hooks
        return sum(tensor.nbytes for tensor in inputs) / 1000
    return sum(sizes.values()) / 1000


def collect(rounds: int, side: int) -> dict[str, dict[str, Measured]]:
    """Measures every function by every route."""
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
    """What the library is held to: memory, which does not depend on the machine."""
    checked = []
    for (function, count), row in zip(ROWS.items(), results.values(), strict=True):
        inputs = count * side * side * 4 / 1000
        name = function.__name__
        # The state of the generator, where a body draws numbers and in every graph.
        checked += [
            Bar(f"{name}: kept by derived", row[DERIVED].kilobytes, inputs + 6, " KB"),
            Bar(f"{name}: kept when compiled", row[COMPILED].kilobytes, inputs + 6, " KB"),
        ]
    return checked


def table(results: dict[str, dict[str, Measured]]) -> Any:
    result = _harness.table("Kept for the backward, and time of training", "function", *ROUTES)
    for name, row in results.items():
        cells = [
            f"{m.kilobytes:.0f} KB  {m.microseconds / row[PLAIN].microseconds:.2f}x"
            for m in row.values()
        ]
        result.add_row(name, *cells)
    return result


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="blocks to time of each route")
    parser.add_argument("--side", type=int, default=250, help="of the matrices that are inputs")
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
