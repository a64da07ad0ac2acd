from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchop
from tests.integration.beginners.mistake import mistake


def returning(n: str, annotation: Any, result: Callable[[Tensor], Any]) -> None:
    def f(x: Tensor) -> Any:
        return result(x)

    f.__annotations__["return"] = annotation
    torchop.custom_op(f"{n}::f", f, mutates_args=())(torch.ones(2, 3))


@mistake(TypeError, cause="but returned None", fix="Is a return statement missing?")
def kernel_returns_none(n: str) -> None:
    returning(n, Tensor, lambda x: None)


@mistake(TypeError, cause="but returned a tuple of 1", fix="Return the tensor alone")
def kernel_returns_a_tuple(n: str) -> None:
    returning(n, Tensor, lambda x: (x.clone(),))


@mistake(TypeError, cause="but returned a list of 2", fix="-> tuple[Tensor, Tensor]")
def kernel_returns_a_list(n: str) -> None:
    returning(n, Tensor, lambda x: [x + 1, x + 2])


@mistake(TypeError, cause="must return 2 values", fix="Return a tuple of 2")
def kernel_returns_one_of_two(n: str) -> None:
    returning(n, tuple[Tensor, Tensor], lambda x: x.clone())


@mistake(TypeError, cause="but returned a numpy.ndarray", fix="torch.from_numpy(...)")
def kernel_returns_an_array(n: str) -> None:
    returning(n, Tensor, lambda x: x.numpy() * 2)


@mistake(TypeError, cause="must return None", fix="Remove the return statement")
def kernel_returns_mutated_argument(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=("x",))
    def f(x: Tensor) -> None:
        return x.add_(1)  # type: ignore[return-value]

    f(torch.ones(1))


@mistake(RuntimeError, cause="output 0 is input 'x' itself", fix="Return a copy, .clone()")
def kernel_returns_its_input(n: str) -> None:
    returning(n, Tensor, lambda x: x)


@mistake(RuntimeError, cause="output 0 shares memory with input 'x'", fix=".clone()")
def kernel_returns_a_view(n: str) -> None:
    returning(n, Tensor, lambda x: x[0])


@mistake(RuntimeError, cause="output 1 shares memory with output 0", fix=".clone()")
def kernel_returns_one_memory_twice(n: str) -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y[:1], y[1:]

    returning(n, tuple[Tensor, Tensor], halves)


@mistake(RuntimeError, cause="x is not defined as mutable but was mutated", fix="in mutates_args")
def mutation_that_is_not_declared(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x.clamp_(min=0).clone()

    with torchop.testing.checking():
        f(torch.tensor([-1.0]))


@mistake(RuntimeError, cause="a leaf Variable that requires grad", fix="under torch.no_grad()")
def writing_into_a_parameter(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=("x",))
    def f(x: Tensor) -> None:
        x.add_(1)

    f(torch.nn.Parameter(torch.ones(1)))
