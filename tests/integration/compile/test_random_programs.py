"""Random programs of reads, writes, copies, effects and floats run as in eager mode when compiled.

To run more programs, such as the seeds 100 to 199:
`python -m tests.integration.compile.test_random_programs 100 200`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.testing import assert_close

import torchop

STEPS = ("read", "write", "write_part", "write_list", "copy", "log", "note", "shift", "arithmetic")
CALLS: list[int] = []


class Step(NamedTuple):
    kind: str
    source: int
    target: int


def operators(namespace: str) -> dict[str, Any]:
    @torchop.custom_op(f"{namespace}::read", mutates_args=())
    def read(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 - y.flip(0)

    read.register_fake(lambda x, y: torch.empty_like(x))

    @torchop.custom_op(f"{namespace}::write", mutates_args=("y",))
    def write(x: Tensor, y: Tensor) -> None:
        y.copy_(y * 0.5 + x.flip(0))

    @torchop.custom_op(f"{namespace}::write_list", mutates_args=("ys",))
    def write_list(x: Tensor, ys: list[Tensor]) -> Tensor:
        for y in ys:
            y.sub_(x)
        return x + 1

    write_list.register_fake(lambda x, ys: torch.empty_like(x))

    @torchop.custom_op(f"{namespace}::log", mutates_args=(), effects="ordered")
    def log(x: Tensor, label: int) -> Tensor:
        CALLS.append(label)
        return x - 1

    log.register_fake(lambda x, label: torch.empty_like(x))

    @torchop.custom_op(f"{namespace}::note", mutates_args=(), effects="ordered")
    def note(x: Tensor, label: int) -> None:
        CALLS.append(label)

    @torchop.custom_op(f"{namespace}::shift", mutates_args=())
    def shift(x: Tensor, s: float) -> Tensor:
        return x + s

    shift.register_fake(lambda x, s: torch.empty_like(x))
    return {
        each.name.partition("::")[2]: each for each in (read, write, write_list, log, note, shift)
    }


def program(ops: dict[str, Any], seed: int) -> Callable[..., list[Tensor]]:
    chance = random.Random(seed)
    steps = [
        Step(chance.choice(STEPS), *chance.sample(range(3), 2)) for _ in range(chance.randint(4, 9))
    ]

    def run(tensors: list[Tensor], s: float) -> list[Tensor]:
        # Two tensors are inputs, which the program may write to. The third is a copy.
        values = [*tensors, tensors[0].clone()]
        results = []
        for label, (kind, source, target) in enumerate(steps):
            x, y = values[source], values[target]
            if kind == "read":
                values[target] = ops["read"](x, y)
            elif kind == "write":
                ops["write"](x, y)
            elif kind == "write_part":
                ops["write"](x[1:], y[1:])
            elif kind == "write_list":
                results.append(ops["write_list"](x, [y]))
            elif kind == "copy":
                values[target] = x.clone()
            elif kind == "log":
                results.append(ops["log"](x * 2, label).sum())
            elif kind == "note":
                ops["note"](y + label, label)
            elif kind == "shift":
                values[target] = ops["shift"](x, s * 2) * s
            else:
                results.append((x + label) * s)
        return [*results, *values]

    return run


def check(namespace: str, seed: int, dynamic: bool | None) -> None:
    run = program(operators(namespace), seed)
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    for size, s in ((5, 1.5), (5, 2.5), (300, 3.5)):
        outcomes = []
        for function in (run, compiled):
            CALLS.clear()
            tensors = [torch.linspace(0.1, 1, size), torch.linspace(-1, 1, size)]
            outcomes.append((function(tensors, s), tensors, list(CALLS)))
        assert_close(outcomes[1], outcomes[0])


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("seed", [0, 1, 104])
def test_random_program_runs_as_in_eager_mode(
    namespace: str, seed: int, dynamic: bool | None
) -> None:
    check(namespace, seed, dynamic)


if __name__ == "__main__":
    for seed in range(*map(int, sys.argv[1:3])):
        torch._dynamo.reset()
        try:
            check(f"random_{seed}", seed, random.Random(seed).choice([None, True]))
        except Exception as error:
            print(seed, type(error).__name__, str(error)[:2000], flush=True)
        else:
            print(seed, "equal", flush=True)
