"""With the mypy plugin, calls to the objects that out_op returns are checked."""

from __future__ import annotations

import torch
from torch import Tensor

import torchop

x = torch.ones(3)


@torchop.out_op("typed::sin", like="x")
def sin(x: Tensor, n: int = 1, *, rounded: bool = False, out: Tensor) -> None: ...


@torchop.out_op("typed::halves", allocate=lambda x: (x, x))
def halves(x: Tensor, *, low: Tensor, high: Tensor) -> None: ...


def right() -> None:
    print(sin(x).shape, sin(x, 2, rounded=True, out=x).shape, sin(n=3, x=x, out=None).shape)
    low, high = halves(x)
    print(low.shape, high.shape, len(halves(x, low=x, high=x)))


def wrong() -> None:
    sin()  # ERROR: an argument is missing
    sin(x, "3")  # ERROR: an argument has the wrong type
    sin(x, 3, True)  # ERROR: a keyword-only argument is passed by position
    sin(x, out=3)  # ERROR: the output is a tensor
    sin(x, low=x)  # ERROR: there is no such output
    print(halves(x).shape)  # ERROR: the result is a tuple
