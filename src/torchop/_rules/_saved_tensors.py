"""`ctx.saved_tensors` that a formula may read several times."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from torchop._compat import autograd


def saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """The saved tensors, which a formula may read several times.

    Selective checkpointing hands each of them out only once; a formula that reads them twice means
    the same tensors. Another thread may run the same node at the same time.
    """
    kept = _unpacked.by_node.get(id(ctx))
    if kept is None:
        return autograd.raw_saved_tensors(ctx)
    if not kept:
        kept.append(autograd.raw_saved_tensors(ctx))
    saved: tuple[Tensor | None, ...] = kept[0]
    return saved


class _Unpacked(threading.local):
    """The saved tensors of the nodes whose backward runs in this thread, by node."""

    def __init__(self) -> None:
        self.by_node: dict[int, list[Any]] = {}


_unpacked = _Unpacked()


class Unpacking:
    """Has `saved_tensors` remember what it found while the backward of one node runs."""

    __slots__ = ("by_node", "node", "outer")

    def __init__(self, ctx: Any) -> None:
        self.by_node = _unpacked.by_node
        self.node = id(ctx)

    def __enter__(self) -> None:
        self.outer = self.by_node.get(self.node)
        self.by_node[self.node] = []

    def __exit__(self, *exception: object) -> None:
        if self.outer is None:
            del self.by_node[self.node]
        else:
            self.by_node[self.node] = self.outer
