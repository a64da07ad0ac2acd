"""Operators that mutate a tensor, one of each form, and programs that call them.

The forms differ in the result: nothing ("plain"), a new tensor ("with a result"), or the mutated
argument (in-place and out= operators). By default, all forms make the same computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from tests._support.releases import of_form

Write = Callable[[Tensor, Tensor], Any]
FORMS = ["plain", "with a result", "inplace", "out"]


def accumulate(target: Tensor, x: Tensor) -> Tensor:
    """Read `target` and write to it, so that calls in an incorrect order change the result."""
    return target.mul_(2).add_(x)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.arange(16.0).reshape(4, 4), torch.arange(16.0).reshape(4, 4).cos()


def run_together(programs: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that runs all programs, each on its own inputs.

    Compiling one graph with all programs is much faster than compiling a graph for each program.
    """

    def run(inputs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
        return {name: program(*inputs[name]) for name, program in programs.items()}

    return run


def assert_equals_eager(
    compiled: Callable[..., Any], eager: Callable[..., Any], names: Iterable[str] = ()
) -> None:
    """Check that a compiled function returns and mutates the same values as an eager one.

    With `names`, both functions must come from `run_together`. Otherwise, they take two tensors.
    """

    def arguments() -> tuple[Any, ...]:
        return ({name: inputs() for name in names},) if names else inputs()

    ours, expected = arguments(), arguments()
    for _ in range(2):  # the second call uses the mutated inputs of the first
        assert_close(compiled(*ours), eager(*expected), rtol=0, atol=0)
        assert_close(ours, expected, rtol=0, atol=0)


def define(
    form: str,
    namespace: str,
    library: Any,
    kernel: Callable[[Tensor, Tensor], Tensor] = accumulate,
) -> Write:
    """Define an operator of the given form, and return it as a function `write(target, x)`."""
    name = f"{namespace}::{kernel.__name__}"
    if form == "plain":

        @library.custom_op(name, mutates_args=("target",))
        def plain(target: Tensor, x: Tensor) -> None:
            kernel(target, x)

        return plain
    if form == "with a result":

        @library.custom_op(name, mutates_args=("target",))
        def with_result(target: Tensor, x: Tensor) -> Tensor:
            kernel(target, x)
            return target + x

        with_result.register_fake(lambda target, x: torch.empty_like(target))
        return with_result
    if form == "inplace":

        @library.custom_op(
            name,
            mutates_args=("target",),
            **of_form("inplace", "(Tensor(a!) target, Tensor x) -> Tensor(a!)"),
        )
        def inplace(target: Tensor, x: Tensor) -> Tensor:
            return kernel(target, x)

        return inplace

    # The argument is named `target`, because Dynamo rejects an argument named `out` if its tensor
    # is not contiguous.
    @library.custom_op(
        name,
        mutates_args=("target",),
        **of_form("out", "(Tensor x, *, Tensor(a!) target) -> Tensor(a!)"),
    )
    def out(x: Tensor, *, target: Tensor) -> Tensor:
        return kernel(target, x)

    return lambda target, x: out(x, target=target)


# Each program takes a function `write` from `define` and two tensors of size 4 by 4. The program
# may mutate the first tensor.
PROGRAMS: dict[str, Callable[[Write, Tensor, Tensor], Any]] = {}


def calling(write: Write, names: Iterable[str] = PROGRAMS) -> dict[str, Callable[..., Any]]:
    return {name: functools.partial(PROGRAMS[name], write) for name in names}


def program(function: Callable[[Write, Tensor, Tensor], Any]) -> None:
    PROGRAMS[function.__name__] = function


@program
def an_input(write, x, y):
    write(x, y)


@program
def an_input_that_is_read_before_and_after(write, x, y):
    before = x + 1
    write(x, y)
    return before, x + 1


@program
def input_with_a_copy(write, x, y):
    before = x.clone()
    write(x, y)
    return before, x * 3


@program
def an_intermediate(write, x, y):
    z = x * 2
    write(z, y)
    return z, z + 1


@program
def an_intermediate_whose_result_is_used(write, x, y):
    z = x * 2
    result = write(z, y)
    return z, z + 1 if result is None else result + 1


@program
def an_empty_buffer_that_is_filled(write, x, y):
    z = torch.zeros_like(x)
    write(z, y)
    return z + 1, z


@program
def a_slice_of_an_input(write, x, y):
    write(x[1:3], y[:2])
    return x + 1


@program
def every_second_row_of_an_input(write, x, y):
    write(x[::2], y[:2])
    return x + 1


@program
def a_slice_of_an_intermediate(write, x, y):
    z = x + 1
    write(z[:, 1:3], y[:, :2])
    return z


@program
def a_row_of_a_transposed_input(write, x, y):
    write(x.t()[1], y[0])
    return x + 1


@program
def a_transposed_intermediate(write, x, y):
    z = x + y
    write(z.t(), y)
    return z


@program
def a_strided_view_of_an_input(write, x, y):
    write(x.as_strided((2, 3), (8, 1), 1), y[:2, :3])
    return x + 1


@program
def a_strided_view_of_an_intermediate(write, x, y):
    z = x + 1
    write(torch.as_strided(z, (2, 2), (5, 2), 1), y[:2, :2])
    return z


@program
def a_diagonal(write, x, y):
    write(x.diagonal(), y[0])
    return x + 1


@program
def a_view_that_is_read_afterwards(write, x, y):
    view = x.view(16)
    write(x, y)
    return view + 1


@program
def a_buffer_twice_in_order(write, x, y):
    write(x, y)
    write(x, x + y)
    return x + 1


@program
def overlapping_views_in_order(write, x, y):
    write(x[:3], y[:3])
    write(x[1:], y[1:])
    return x + 1


@program
def a_buffer_between_operators_of_pytorch(write, x, y):
    x.add_(1)
    write(x, y)
    x.mul_(3)
    write(x, y)
    return x + 1


@program
def read_argument_is_a_view_of_the_mutated_one(write, x, y):
    write(x[:2], x[2:])
    return x + 1


@program
def the_result_of_another_call(write, x, y):
    z = y.sin()
    write(z, x)
    write(x, z)
    return z
