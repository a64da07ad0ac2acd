"""Inductor allocates and copies as little as possible for operators that write to large buffers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torchop

from .mutating import FORMS, define

ROWS, WIDTH = 512, 16


class Costs(NamedTuple):
    """The size of each allocation in elements, and the number of kernels in Inductor's code."""

    allocations: list[int]
    kernels: int


def costs(function: Callable[..., Any], *args: Any) -> Costs:
    _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    body = code.partition("def call(")[2].partition("runner =")[0]
    sizes = re.findall(r"empty_strided(?:_\w+)?\(\(([\d, ]+)\)", body)
    allocations = [
        torch.Size(int(n) for n in size.split(",") if n.strip()).numel() for size in sizes
    ]
    return Costs(allocations, len(re.findall(r"^\s+cpp_fused_\w+\(", body, re.MULTILINE)))


def _module(write: Any) -> Any:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(ROWS, WIDTH))

        def forward(self, row: Tensor) -> None:
            write(self.cache[7:8], row)

    return Attention()


def _several(write: Any) -> Any:
    def function(cache: Tensor, row: Tensor) -> None:
        for position in range(4):
            write(cache[position : position + 1], row)

    return function


def _cache() -> Tensor:
    return torch.zeros(ROWS, WIDTH)


def _row() -> Tensor:
    return torch.ones(1, WIDTH)


def _written(write: Any) -> Any:
    def function(cache: Tensor, row: Tensor) -> None:
        write(cache, row)

    return function


def _and_read(write: Any) -> Any:
    def function(cache: Tensor, row: Tensor) -> Tensor:
        write(cache[3:4], row)
        return cache[:2]

    return function


PROGRAMS: dict[str, tuple[Callable[[Any], Any], Callable[[], tuple[Tensor, ...]]]] = {
    "all of an input": (_written, lambda: (_cache(), _row())),
    "a row of a module's buffer": (_module, lambda: (_row(),)),
    "rows of an input in order": (_several, lambda: (_cache(), _row())),
    "a row of an input that is read then": (_and_read, lambda: (_cache(), _row())),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_cache_is_written_in_place(namespace, name, form):
    make, args = PROGRAMS[name]
    found = costs(make(define(form, namespace, torchop)), *args())
    assert not [size for size in found.allocations if size >= ROWS * WIDTH]
    assert found == Costs([], 0)


@pytest.mark.parametrize("form", FORMS)
def test_the_old_value_costs_one_copy_if_it_is_used_later(namespace, form):
    write = define(form, namespace, torchop)

    def function(cache: Tensor, row: Tensor) -> Tensor:
        before = cache * 1.5
        write(cache, row)
        return before

    found = costs(function, _cache(), _row())
    assert found.allocations == [ROWS * WIDTH]
