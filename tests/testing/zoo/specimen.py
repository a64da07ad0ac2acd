"""Functions that define and list the operators of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchop

Examples = Callable[[], list[Any]]


class Specimen(NamedTuple):
    """An operator, and the check that must report it. `check` is None for a correct operator."""

    op: Any
    examples: Examples
    check: str | None
    reference: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return str(self.op.name if isinstance(self.op, torchop.CustomOp) else self.op)


WRONG: list[Specimen] = []
RIGHT: list[Specimen] = []


def wrong(
    op: Any, check: str, examples: Examples, reference: Callable[..., Any] | None = None
) -> Any:
    """Add a faulty operator to the zoo, which the given check must report."""
    WRONG.append(Specimen(op, examples, check, reference))
    return op


def right(op: Any, examples: Examples, reference: Callable[..., Any] | None = None) -> Any:
    """Add a correct operator to the zoo, which no check may report."""
    RIGHT.append(Specimen(op, examples, None, reference))
    return op


def define(name: str, function: Callable[..., Any], **options: Any) -> Any:
    """Define `zoo::name`. By default, the fake kernel calls the function."""
    fake = options.pop("fake", lambda *args, **kwargs: function(*args, **kwargs))
    mutates = options.pop("mutates_args", ())
    op = torchop.custom_op(f"zoo::{name}", function, mutates_args=mutates, **options)
    if fake is not None:
        op.register_fake(fake)
    return op


def like(x: Tensor, *others: Any) -> Tensor:
    """Fake kernel for elementwise operators with contiguous results."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def floats_only(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise TypeError(f"{name} takes floating-point tensors, got {tensor.dtype}")


def raw(x: Tensor) -> Tensor:
    """Return the storage of a tensor as a vector, like a kernel that ignores strides and offset."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())


def save(ctx: Any, inputs: Any, output: Any) -> None:
    """A setup_context that saves all input tensors."""
    ctx.save_for_backward(*[value for value in inputs if isinstance(value, Tensor)])


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def product_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return (grad * y).sum_to_size(x.shape), (grad * x).sum_to_size(y.shape)


# --------------------------------------------------------------------------------------------------
# Examples of arguments, with the same random numbers in every run


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one() -> list[Any]:
    return [(_random(3, 4),)]


def positive() -> list[Any]:
    return [(_random(3, 4).abs() + 0.5,)]


def two() -> list[Any]:
    return [(_random(3, 4), _random(3, 4, seed=1))]


def image() -> list[Any]:
    return [(_random(2, 3, 4, 5),)]


def rows_and_weights() -> list[Any]:
    return [(_random(3, 4), _random(4, seed=1))]
