"""Faulty operators whose kernel has a different default than the schema."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, floats_only, like, one, right, wrong
from tests.testing.zoo.wrong_memory import LIBRARY


def scaled_by_three(x: Tensor, factor: float = 3.0) -> Tensor:
    floats_only("scaled_by_three", x)
    return (x.detach() * factor).contiguous()


def scaled_by_two(x: Tensor, factor: float = 2.0) -> Tensor:
    floats_only("scaled_by_two", x)
    return (x.detach() * factor).contiguous()


def _with_factor() -> list[Any]:
    return [*one(), (*one()[0], 0.5)]


SCHEMA = "(Tensor x, float factor=2.0) -> Tensor"
for name, kernel in (("default_of_schema", scaled_by_two), ("default_of_kernel", scaled_by_three)):
    LIBRARY.define(f"{name}{SCHEMA}")
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"zoo::{name}", like, lib=LIBRARY)
right("zoo::default_of_schema", _with_factor)
wrong("zoo::default_of_kernel", "contracts.defaults", _with_factor)
right(define("scaled_by_two", scaled_by_two, schema=SCHEMA, fake=like), _with_factor)
