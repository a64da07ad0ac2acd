"""How long a call of an operator is expected to take: a rule of a package of its own."""

from collections.abc import Callable
from typing import Any

import torchop

Estimate = Callable[..., float]


class Latency(torchop.Rule[Estimate]):
    """A function of the operator's arguments that returns seconds, or just the seconds."""

    def validate(self, op: Any, value: Any) -> Estimate:
        if isinstance(value, float):
            return lambda *args, **kwargs: value
        return super().validate(op, value)

    def missing(self, op: Any) -> Estimate:
        return lambda *args, **kwargs: 0.0


latency = Latency("latency")


def estimate(*calls: tuple[Any, ...]) -> float:
    """Adds up the calls of a program, each a tuple of an operator and its arguments."""
    return sum(latency.lookup(op)(*args) for op, *args in calls)
