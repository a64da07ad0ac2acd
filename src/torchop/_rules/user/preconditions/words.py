"""Preconditions that need no other argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchop._rules.user.preconditions.base import Arguments, Precondition


@dataclasses.dataclass(frozen=True)
class Sorted(Precondition):
    """Elements that never decrease along the last dimension.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Sorted()
        Sorted()
    """

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        # Compared, because the difference of unsigned numbers is never negative.
        is_sorted = value.dim() < 1 or bool((value[..., 1:] >= value[..., :-1]).all())
        return None if is_sorted else "its elements are not sorted"

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        return value if self.problem(value, arguments) is None else value.sort(-1).values


@dataclasses.dataclass(frozen=True)
class Unique(Precondition):
    """Elements that occur only once, such as the indices at which an operator writes.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Unique()
        Unique()
    """

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        is_unique = len(value.unique()) == value.numel()
        return None if is_unique else "an element occurs more than once"

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        if self.problem(value, arguments) is None:
            return value
        # The smallest numbers that are free: where these were indices, they still are.
        present = value.flatten().tolist()
        free = iter(sorted(set(range(len(present))) - set(present)))
        seen: set[float] = set()
        made = [number if number not in seen else next(free) for number in _noted(present, seen)]
        return torch.tensor(made, dtype=value.dtype, device=value.device).view_as(value)


def _noted(numbers: list[float], seen: set[float]) -> Iterator[float]:
    """The numbers; each is in `seen` from the next one on."""
    for number in numbers:
        yield number
        seen.add(number)


@dataclasses.dataclass(frozen=True)
class Dtype(Precondition):
    """The dtypes of a tensor, all of which the operator takes.

    Args:
        dtypes: one or several objects of `torch.dtype`.

    Example:
        >>> import torch, torchop
        >>> torchop.preconditions.Dtype(torch.float32, torch.bfloat16)
        Dtype(dtypes=(torch.float32, torch.bfloat16))
    """

    dtypes: tuple[torch.dtype, ...]

    def __init__(self, *dtypes: torch.dtype) -> None:
        _check_items("Dtype", dtypes, lambda dtype: isinstance(dtype, torch.dtype), "dtypes")
        object.__setattr__(self, "dtypes", dtypes)

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        if value.dtype in self.dtypes:
            return None
        return f"its dtype is {value.dtype}, which is not one of {', '.join(map(str, self.dtypes))}"

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        return value if value.dtype in self.dtypes else value.to(self.dtypes[0])

    def limits(self, value: Tensor, arguments: Arguments) -> Iterator[Tensor]:
        return (value.to(dtype) for dtype in self.dtypes)


@dataclasses.dataclass(frozen=True)
class OneOf(Precondition):
    """The values of an argument, all of which the operator takes.

    Args:
        values: strings, ints, or whatever the argument may be.

    Example:
        >>> import torchop
        >>> torchop.preconditions.OneOf("sum", "mean")
        OneOf(values=('sum', 'mean'))
    """

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        _check_items("OneOf", values, lambda value: not isinstance(value, Tensor), "values")
        object.__setattr__(self, "values", values)

    def problem(self, value: Any, arguments: Arguments) -> str | None:
        return None if value in self.values else f"{value!r} is not one of {self.values}"

    def fitted(self, value: Any, arguments: Arguments) -> Any:
        return value if value in self.values else self.values[0]

    def limits(self, value: Any, arguments: Arguments) -> Iterator[Any]:
        return iter(self.values)


@dataclasses.dataclass(frozen=True)
class Shape(Precondition):
    """The sizes of a tensor. Sizes with the same name are equal, also in different arguments.

    Args:
        dims: an int or a name for each dimension. If an int argument has that name, the size is
            the value of the argument.
        least: the smallest size that a name may stand for.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Shape("rows", 3, least=1)
        Shape(dims=('rows', 3), least=1)
    """

    dims: tuple[str | int, ...]
    least: int

    def __init__(self, *dims: str | int, least: int = 0) -> None:
        sizes = (least, *(dim for dim in dims if not isinstance(dim, str)))
        _check_items("Shape", sizes, _is_size, "names of sizes, and ints from 0")
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "least", least)

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        if value.dim() != len(self.dims):
            return f"it has {value.dim()} dimensions instead of {len(self.dims)}"
        for dim, size in zip(self.dims, value.shape, strict=True):
            if isinstance(dim, int) and size != dim:
                return f"its shape is {[*value.shape]} instead of {[*self.dims]}"
            if isinstance(dim, str) and size < self.least:
                return f"the size {dim!r} must be at least {self.least}, got {size}"
        return None

    def named(self, value: Tensor) -> dict[str, int]:
        """The sizes of a tensor by their names."""
        pairs = zip(self.dims, value.shape, strict=True)
        return {dim: size for dim, size in pairs if isinstance(dim, str)}


@dataclasses.dataclass(frozen=True)
class Contiguous(Precondition):
    """Contiguous tensors, because the operator is never called with others.

    Example:
        >>> import torchop
        >>> torchop.preconditions.Contiguous()
        Contiguous()
    """

    def problem(self, value: Tensor, arguments: Arguments) -> str | None:
        return None if value.is_contiguous() else "it is not contiguous"

    def fitted(self, value: Tensor, arguments: Arguments) -> Tensor:
        return value.contiguous()


def _is_size(dim: Any) -> bool:
    return type(dim) is int and dim >= 0


def _check_items(
    word: str, items: tuple[Any, ...], accepts: Callable[[Any], bool], what: str
) -> None:
    if not items or not all(map(accepts, items)):
        raise ValueError(f"{word}(...) takes {what}, at least one; got {items!r}.")
