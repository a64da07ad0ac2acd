"""A rule that estimates the time of a call, in a separate package."""

from collections.abc import Callable
from typing import Any

import torchop

Estimate = Callable[..., float]


class Latency(torchop.Rule[Estimate]):
    """The time of a call: a number of seconds, or a function of the arguments that returns one."""

    def validate(self, op: Any, value: Any) -> Estimate:
        if isinstance(value, float):
            return lambda *args, **kwargs: value
        return super().validate(op, value)

    def missing(self, op: Any) -> Estimate:
        return lambda *args, **kwargs: 0.0


latency = Latency("latency")


def estimate(*calls: tuple[Any, ...]) -> float:
    """Return the estimated time of several calls, each a tuple of an operator and arguments."""
    return sum(latency.lookup(op)(*args) for op, *args in calls)
