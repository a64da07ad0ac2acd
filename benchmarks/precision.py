"""Measure calls to operators that declare the precision or the layout of their inputs.

In an autocast region, a call casts two small float32 tensors, or gets tensors of the right dtype:

- torchop: the operator has the autocast policy "low_precision".
- wrapper: a function written by hand casts the inputs and disables autocast.

PyTorch copies the tensors in both variants, so the variants differ only in the remaining time.

In the row "two layouts", the operator of torchop declares that two arguments are contiguous, and
the operator "none" declares nothing. Both get contiguous tensors, so no call copies anything.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

import harness
import torchop
from harness import Benchmark, Limit, Settings, Tables, Variant

TABLE = "calls"
CAST, RIGHT = "autocast, two casts", "autocast, no casts"
LAYOUTS = "two layouts"
TORCHOP, WRAPPER, NONE = "torchop", "wrapper", "none"


def add(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def add_contiguous(
    x: Annotated[Tensor, torchop.contiguous], y: Annotated[Tensor, torchop.contiguous]
) -> Tensor:
    return torch.empty_like(x)


def measure(settings: Settings) -> Tables:
    op = torchop.custom_op("bench_precision::add", add, mutates_args=())
    op.register_autocast("low_precision")
    plain = torchop.custom_op("bench_precision::plain", add, mutates_args=())

    def wrapper(x: Tensor, y: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return plain(x, y)
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            return plain(x.to(dtype), y.to(dtype))

    inputs = torch.ones(4), torch.ones(4)
    lower = tuple(each.bfloat16() for each in inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        rows = {
            row: {TORCHOP: Variant(op, args), WRAPPER: Variant(wrapper, args)}
            for row, args in ((CAST, inputs), (RIGHT, lower))
        }
        found = {row: harness.measure(of, settings["rounds"]) for row, of in rows.items()}
    layouts = torchop.custom_op("bench_precision::layouts", add_contiguous, mutates_args=())
    variants = {TORCHOP: Variant(layouts, inputs), NONE: Variant(plain, inputs)}
    with torch.no_grad():
        return {TABLE: {**found, LAYOUTS: harness.measure(variants, settings["rounds"])}}


BENCHMARK = Benchmark(
    name="precision",
    units={TABLE: "us"},
    parts={"calls": measure},
    settings={"processes": 3, "rounds": 100},
    limits=(
        Limit(TABLE, CAST, TORCHOP, 1.15, WRAPPER),
        Limit(TABLE, RIGHT, TORCHOP, 1.15, WRAPPER),
        Limit(TABLE, LAYOUTS, TORCHOP, 1.05, NONE),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
