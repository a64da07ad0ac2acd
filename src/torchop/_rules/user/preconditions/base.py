"""What a precondition is, and the constraints of `torch.distributions` as such.

Ranges and matrices have words there, which every installation of PyTorch has, and which say how
numbers become valid ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import transform_to
from torch.distributions.constraints import Constraint

Arguments = Mapping[Any, Any]  # the arguments of a call, by name


class Unfit(ValueError):  # noqa: N818  (caught where a variant is made: there is no such one)
    """Nothing near a value is valid, such as indices into something empty."""


@dataclasses.dataclass(frozen=True)
class Precondition:
    """What is valid for an argument; the classes of `torchop.preconditions` inherit from it."""

    @property
    def others(self) -> tuple[str, ...]:
        """The other arguments of which it speaks."""
        return ()

    def problem(self, value: Any, arguments: Arguments) -> str | None:
        """What is wrong with a value, in words that follow "is not valid, because"."""
        raise NotImplementedError

    def fitted(self, value: Any, arguments: Arguments) -> Any:
        """A valid value near this one, which is this one where it is valid.

        Raises:
            Unfit: there is none.
        """
        return value

    def bounds(self, value: Any, arguments: Arguments) -> tuple[Any, Any]:
        """The smallest and the largest element; None where there is no such bound."""
        return None, None

    def limits(self, value: Any, arguments: Arguments) -> Iterator[Any]:
        """Values at the limits of what is valid, which the others may forbid."""
        for bound in self.bounds(value, arguments):
            if bound is not None:
                yield torch.full_like(value, bound)


@dataclasses.dataclass(frozen=True)
class Satisfies(Precondition):
    """A constraint of `torch.distributions`, which is about the numbers of one argument."""

    constraint: Constraint

    def __repr__(self) -> str:
        return repr(self.constraint)

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        # Half precision has no decompositions, by which matrices are checked.
        value = value.double() if value.is_floating_point() else value
        try:
            is_valid = bool(self.constraint.check(value).all())
        except (RuntimeError, ValueError, IndexError) as error:  # of a shape that makes no sense
            return f"{self.constraint} does not hold: {error}"
        return None if is_valid else f"{self.constraint} does not hold"

    def bounds(self, value: Tensor, arguments: Arguments) -> tuple[Any, Any]:
        if value.is_complex():
            return None, None  # they have no order
        low, high = (getattr(self.constraint, f"{end}_bound", None) for end in ("lower", "upper"))
        return self._inside(low, value, math.inf), self._inside(high, value, -math.inf)

    def _inside(self, bound: float | None, value: Tensor, towards: float) -> Any:
        """A bound, or the number beside it where the interval is open there."""
        if bound is None:
            return None
        at = torch.tensor(bound, dtype=value.dtype)
        # PyTorch cannot compare the floating-point numbers of eight bits.
        if bool(self.constraint.check(at.double() if at.is_floating_point() else at)):
            return at.item()
        if not at.is_floating_point():
            return at.item() + (1 if towards > 0 else -1)
        if at.itemsize == 1:
            limits = torch.finfo(at.dtype)
            step = max(abs(at.item()) * limits.eps, limits.tiny)
            return at.item() + math.copysign(step, towards)
        return torch.nextafter(at, torch.tensor(towards, dtype=at.dtype)).item()

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        if self.problem(value, arguments) is None:
            return value
        if value.is_complex():
            raise Unfit(f"{self.constraint} does not hold, and complex numbers have no order")
        if value.is_floating_point():
            value = value.double().nan_to_num(0.0).to(value.dtype)
        low, high = self.bounds(value, arguments)
        if low is not None or high is not None:
            is_small = value.is_floating_point() and value.itemsize == 1
            return (value.float() if is_small else value).clamp(low, high).to(value.dtype)
        try:
            # Small numbers, of which well-conditioned matrices are made.
            scale = value.double().abs().amax().clamp(min=1) * value.shape[-1]
            made: Tensor = transform_to(self.constraint)(value.double() / scale)
        except (NotImplementedError, RuntimeError, ValueError, IndexError) as error:
            raise Unfit(f"{self.constraint} has no value near it: {error}") from None
        return made.to(value.dtype)


def bounds(words: Iterable[Precondition], value: Any, arguments: Arguments) -> tuple[Any, Any]:
    """The smallest and the largest number that all of these words allow; None for no bound."""
    lows, highs = [], []
    for word in words:
        if all(arguments.get(each) is not None for each in word.others):
            low, high = word.bounds(value, arguments)
            lows += [] if low is None else [low]
            highs += [] if high is None else [high]
    return max(lows, default=None), min(highs, default=None)


def with_size(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A tensor with another size in a dimension: the first elements, or all of them repeated."""
    old = tensor.shape[dim]
    if size <= old:
        return tensor if size == old else tensor.narrow(dim, 0, size)
    if old == 0:
        raise Unfit("there is no element to repeat")
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % old)
