"""An operator with a dataclass argument, which the handle flattens and the kernel gets rebuilt."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import torchop
from _harness import Call
from _routes import HANDLE, OPS, PLAIN, Row

TITLE = "dataclass, 5 fields"


@dataclasses.dataclass(frozen=True)
class Config:
    weight: Tensor
    scale: float = 1.0
    count: int = 3
    flag: bool = False
    mode: str = "linear"


def clone(x: Tensor, config: Config) -> Tensor:
    return x.clone()


def row() -> Row:
    """Define the operator; no other route supports dataclasses."""
    ours = torchop.custom_op("bench_torchop::structured", clone, mutates_args=())
    x, config = torch.randn(4), Config(torch.randn(4), 2.0)
    values = dataclasses.asdict(config)
    flat = {f"config_{name}": values[name] for name in ("scale", "count", "flag", "mode")}
    calls = {
        PLAIN: Call(clone, [x, config], {}),
        HANDLE: Call(ours, [x, config], {}),
        OPS: Call(ours.overload, [x, config.weight], flat),
    }
    return Row(TITLE, calls, ours)
