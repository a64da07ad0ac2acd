"""Add a rule to torchop for estimates of how long a call to an operator takes."""

from collections.abc import Callable
from typing import Any

import torchop

Estimate = Callable[..., float]


class Latency(torchop.Rule[Estimate]):
    """The time that a call takes, in seconds: a number, or a function of the call's arguments."""

    def validate(self, op: Any, value: Any) -> Estimate:
        if isinstance(value, float):
            return lambda *args, **kwargs: value
        return super().validate(op, value)

    def missing(self, op: Any) -> Estimate:
        return lambda *args, **kwargs: 0.0


latency = Latency("latency")


def estimate(*calls: tuple[Any, ...]) -> float:
    """Return the estimated time of several calls. Each call is a tuple (operator, *arguments)."""
    return sum(latency.lookup(op)(*args) for op, *args in calls)
