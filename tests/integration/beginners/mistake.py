"""Collect mistakes that beginners make, with text that the error messages must contain.

Each decorated function makes one mistake that is likely for somebody who has not read the
documentation. The message must name the operator, the cause and the fix. If the operator could not
be defined, the message names the function instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchop


class Mistake(NamedTuple):
    make: Callable[[str], Any]
    kind: type[BaseException]
    cause: str
    fix: str


MISTAKES: dict[str, Mistake] = {}


def mistake(
    kind: type[BaseException], *, cause: str, fix: str
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a function that makes a mistake. It takes the namespace for its operators.

    The message of the exception or warning must contain `cause` and `fix`.
    """

    def enter(make: Callable[[str], Any]) -> Callable[[str], Any]:
        MISTAKES[make.__name__] = Mistake(make, kind, cause, fix)
        return make

    return enter


def scale_of(n: str, **options: Any) -> Any:
    @torchop.custom_op(f"{n}::scale", mutates_args=(), **options)
    def scale(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    return scale


def multiply_of(n: str) -> Any:
    @torchop.custom_op(f"{n}::multiply", mutates_args=())
    def multiply(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    return multiply


def compiled(function: Callable[[Tensor], Any], x: Tensor, backend: str = "eager") -> None:
    torch.compile(function, backend=backend, fullgraph=True)(x)
