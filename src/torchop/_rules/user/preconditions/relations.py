"""Preconditions that relate an argument to another: indices, offsets, lengths, and `Like`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from torchop._rules.user.preconditions.base import (
    Arguments,
    Precondition,
    Satisfies,
    Unfit,
    with_size,
)


@dataclasses.dataclass(frozen=True)
class Related(Precondition):
    """What the elements of one argument have to do with a size of another."""

    of: Any  # a name; for relations that `check` finds itself, a place
    dim: int = 0

    def __post_init__(self) -> None:
        of, *others = dataclasses.astuple(self)
        kinds = [field.type for field in dataclasses.fields(self)][1:]
        fit = [type(other).__name__ == kind for other, kind in zip(others, kinds, strict=True)]
        if not isinstance(of, str | int) or not all(fit):
            raise ValueError(
                f"{type(self).__name__}(...) takes the name of an argument, and ints, or a bool "
                f"for last; got {self}."
            )

    @property
    def others(self) -> tuple[str, ...]:
        return (self.of,)

    def bounds(self, value: Tensor, arguments: Arguments) -> tuple[int, int]:
        return 0, self.size(arguments)

    def size(self, arguments: Arguments) -> int:
        """The size: of a tensor in a dimension, of a list, or the int itself."""
        other = arguments[self.of]
        if isinstance(other, Tensor):
            if not -other.dim() <= self.dim < other.dim():
                raise Unfit(f"{self.of!r} has no dimension {self.dim}")
            return other.shape[self.dim]
        return other if isinstance(other, int) else len(other)

    def of_what(self, arguments: Arguments) -> str:
        """The size in words."""
        is_tensor = isinstance(arguments[self.of], Tensor)
        where = f" in dimension {self.dim}" if is_tensor else ""
        return f"{self.size(arguments)}, the size of {self.of!r}{where}"


@dataclasses.dataclass(frozen=True)
class Indices(Related):
    """Indices into another argument: integers from 0 to its size, which is excluded.

    Args:
        of: the name of the other argument: a tensor, a list, or an int that is the size itself.
        dim: the dimension of a tensor.
        least: the smallest index, such as -1 if that stands for padding.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Indices("table")
        Indices(of='table', dim=0, least=0)
    """

    least: int = 0

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        if not value.numel():
            return None
        low, high = int(value.min()), int(value.max())
        if low >= self.least and high < self.size(arguments):
            return None
        return (
            f"its elements go from {low} to {high}, but must be at least {self.least} and below "
            f"{self.of_what(arguments)}"
        )

    def bounds(self, value: Tensor, arguments: Arguments) -> tuple[int, int]:
        return self.least, self.size(arguments) - 1

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        low, high = self.bounds(value, arguments)
        if value.numel() and high < low:
            raise Unfit("there are indices, but nothing that they could refer to")
        # A small dtype holds not all of them.
        is_integer = not value.is_floating_point() and value.dtype is not torch.bool
        high = min(high, torch.iinfo(value.dtype).max) if is_integer else high
        return value.clamp(low, high) if value.numel() else value


@dataclasses.dataclass(frozen=True)
class Offsets(Related):
    """Where segments of another argument start: integers that begin with 0 and never decrease.

    Args:
        of: the name of the other argument: a tensor, a list, or an int that is the size itself.
        dim: the dimension of a tensor.
        last: whether the last offset is the size, because the last segment ends there, as in CSR
            tensors. Otherwise each offset is the start of a segment, as the offsets of
            `torch.nn.EmbeddingBag` are by default.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Offsets("values", last=False)
        Offsets(of='values', dim=0, last=False)
    """

    last: bool = True

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        if value.dim() != 1 or len(value) < self.last:
            return "offsets must have one dimension, and the end as their last element"
        end = self.size(arguments)
        if len(value) and int(value[0]) != 0:
            return f"offsets must start with 0, but the first is {int(value[0])}"
        if bool((value[1:] < value[:-1]).any()):
            return "offsets must not decrease"
        if len(value) and (int(value[-1]) > end or (self.last and int(value[-1]) != end)):
            relation = "end with" if self.last else "be at most"
            end_words = self.of_what(arguments)
            return f"offsets must {relation} {end_words}, but the last is {int(value[-1])}"
        return None

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        if value.dim() != 1 or len(value) < 1 + self.last:
            if self.problem(value, arguments) is None:
                return value
            raise Unfit("there are too few offsets for a segment")
        made = value.clamp(0, self.size(arguments)).cummax(0).values
        made[0] = 0
        if self.last:
            made[-1] = self.size(arguments)
        return made

    def limits(self, value: Tensor, arguments: Arguments) -> Iterator[Tensor]:
        yield torch.zeros_like(value)  # all of it in the last segment
        yield torch.full_like(value, self.size(arguments))  # in the first one


@dataclasses.dataclass(frozen=True)
class Lengths(Related):
    """The lengths of the segments of another argument: integers from 0 whose sum is its size.

    Args:
        of: the name of the other argument: a tensor, a list, or an int that is the size itself.
        dim: the dimension of a tensor.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Lengths("values")
        Lengths(of='values', dim=0)
    """

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        if value.numel() and int(value.min()) < 0:
            return f"lengths must not be negative, but one is {int(value.min())}"
        if int(value.sum()) != self.size(arguments):
            return (
                f"lengths must add up to {self.of_what(arguments)}, but their sum is {value.sum()}"
            )
        return None

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        total = self.size(arguments)
        if not value.numel():
            if total:
                raise Unfit(f"there are no lengths, so their sum cannot be {total}")
            return value
        # What is above the sum is taken from the last ones, and what is missing added to the last.
        ends = value.flatten().clamp(min=0).cumsum(0).clamp(max=total)
        ends[-1] = total
        return ends.diff(prepend=ends.new_zeros(1)).view_as(value).to(value.dtype)

    def limits(self, value: Tensor, arguments: Arguments) -> Iterator[Tensor]:
        yield torch.zeros_like(value)
        yield torch.full_like(value, self.size(arguments))


@dataclasses.dataclass(frozen=True)
class Like(Precondition):
    """The shape, dtype and device of another tensor, as `torch.empty_like` takes them over.

    Args:
        of: the name of the other argument.
        same: what has to be equal: `"shape"`, `"dtype"` or `"device"`; by default all three.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Like("x", "dtype", "device")
        Like(of='x', same=('dtype', 'device'))
    """

    of: str
    same: tuple[Literal["shape", "dtype", "device"], ...]

    def __init__(self, of: str, *same: Literal["shape", "dtype", "device"]) -> None:
        known = ("shape", "dtype", "device")
        if not isinstance(of, str) or not all(each in known for each in same):
            raise ValueError(
                "Like(...) takes the name of an argument, and 'shape', 'dtype' and 'device'; got "
                f"{(of, *same)}."
            )
        object.__setattr__(self, "of", of)
        object.__setattr__(self, "same", same or known)

    @property
    def others(self) -> tuple[str, ...]:
        return (self.of,)

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        for what in self.same:
            own, other = getattr(value, what), getattr(arguments[self.of], what)
            if own != other:
                return f"its {what} is {own}, but that of {self.of!r} is {other}"
        return None

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        other = arguments[self.of]
        if "shape" in self.same and value.shape != other.shape:
            if value.dim() != other.dim():
                raise Unfit(f"{self.of!r} has {other.dim()} dimensions instead of {value.dim()}")
            for dim, size in enumerate(other.shape):
                value = with_size(value, dim, size)
        dtype = other.dtype if "dtype" in self.same else value.dtype
        return value.to(other.device if "device" in self.same else value.device, dtype)


OF_INTEGERS = (Indices, Lengths, Offsets)


def is_of_integers(word: Precondition) -> bool:
    """Whether a word is about whole numbers alone."""
    discrete = isinstance(word, Satisfies) and word.constraint.is_discrete
    return discrete or isinstance(word, OF_INTEGERS)
