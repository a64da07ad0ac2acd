from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

from torch import Tensor


class Mode(enum.Enum):
    LINEAR = 1
    CUBIC = 2


class Sides(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float
    count: int = 3


@dataclasses.dataclass
class Plain:
    scale: float = 1.0
    names: list[str] = dataclasses.field(default_factory=list)
    inner: Frozen = Frozen(2.0)


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("count", "scale")
    scale: float
    count: int


@dataclasses.dataclass
class Checked:
    size: int
    double: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size is negative")
        self.double = 2 * self.size


class More(Plain):
    pass


@dataclasses.dataclass
class OwnInit:
    size: int
    double: int = dataclasses.field(init=False)

    def __init__(self, size: int) -> None:
        self.size = size
        self.double = 2 * size


@dataclasses.dataclass
class State:
    size: int
    calls: int = dataclasses.field(default=0, init=False)


def with_calls(size: int, calls: int) -> State:
    state = State(size)
    state.calls = calls
    return state


class Point(NamedTuple):
    x: int
    y: float = 0.5


class WithTensor(NamedTuple):
    weight: Tensor
    bias: Optional[Tensor] = None


def same(left: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        return left is right
    if isinstance(right, float):
        return type(left) is float and repr(left) == repr(right)
    if isinstance(right, dict):
        return (
            type(left) is dict
            and list(left) == list(right)
            and all(same(left[key], right[key]) for key in right)
        )
    if isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def recorder(annotation: Any, seen: list[Any]) -> Callable[..., Tensor]:
    def function(x: Tensor, a: Any) -> Tensor:
        seen.append(a)
        return x.clone()

    function.__annotations__ = {"x": Tensor, "a": annotation, "return": Tensor}
    return function
