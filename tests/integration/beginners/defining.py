from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchop
from tests.integration.beginners.mistake import mistake, scale_of


@mistake(TypeError, cause="needs the name", fix='@torchop.custom_op("mylib::f", mutates_args=())')
def decorator_without_parentheses(n: str) -> None:
    @torchop.custom_op  # type: ignore[arg-type]
    def f(x: Tensor) -> Tensor:
        return x.clone()


@mistake(ValueError, cause="the name of an operator must be a string", fix='("mylib::f", ...)')
def class_decorator_without_parentheses(n: str) -> None:
    @torchop.operator  # type: ignore[arg-type]
    class f:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()


@mistake(
    TypeError, cause="needs the name", fix='@torchop.custom_op("mylib::crop", mutates_args=())'
)
def no_name(n: str) -> None:
    @torchop.custom_op(mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x.clone()


@mistake(ValueError, cause="does not have the form namespace::name", fix='"mylib::crop"')
def no_namespace(n: str) -> None:
    @torchop.custom_op("f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x.clone()


@mistake(ValueError, cause="may hold only ASCII letters, digits and underscores", fix="mylib::crop")
def hyphen_in_the_namespace(n: str) -> None:
    @torchop.custom_op(f"my-{n}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x.clone()


@mistake(
    TypeError, cause="the tensor arguments that the function writes into", fix="mutates_args=()"
)
def no_mutates_args(n: str) -> None:
    @torchop.custom_op(f"{n}::f")
    def f(x: Tensor) -> Tensor:
        return x.clone()


@mistake(
    ValueError, cause="It is a method", fix="write @staticmethod above it and leave out 'self'"
)
def method(n: str) -> None:
    class Layer:
        @torchop.custom_op(f"{n}::f", mutates_args=())
        def f(self, x: Tensor) -> Tensor:
            return x.clone()


@mistake(ValueError, cause="'**options' is variadic keyword", fix="such as *, scale: float = 1.0")
def arbitrary_keywords(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, **options: Any) -> Tensor:
        return x.clone()


@mistake(ValueError, cause="'*xs' is variadic positional", fix="such as list[Tensor]")
def arbitrary_arguments(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(*xs: Tensor) -> Tensor:
        return xs[0].clone()


@mistake(ValueError, cause="'options' has unsupported type dict", fix="a dict[str, float] or the")
def dict_of_anything(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, options: dict) -> Tensor:  # type: ignore[type-arg]
        return x.clone()


@mistake(ValueError, cause="'sizes' has unsupported type list", fix="list[int]")
def list_of_anything(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, sizes: list) -> Tensor:  # type: ignore[type-arg]
        return x.clone()


@mistake(ValueError, cause="unsupported type tuple[int, float]", fix="a NamedTuple")
def tuple_of_different_types(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, pair: tuple[int, float]) -> Tensor:
        return x.clone()


@mistake(ValueError, cause="'x' has unsupported type numpy.ndarray", fix="torch.Tensor")
def array_parameter(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x)


@mistake(ValueError, cause="return has unsupported type numpy.ndarray", fix="supported are Tensor")
def array_result(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor) -> np.ndarray:
        return x.numpy()


@mistake(ValueError, cause="an operator cannot take functions", fix="call the function before or")
def function_parameter(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        return activation(x)


@mistake(ValueError, cause="an operator cannot take modules", fix="pass the tensors, such as")
def module_parameter(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, layer: torch.nn.Linear) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]


@mistake(ValueError, cause="'y' must have a type annotation", fix="supported are Tensor, int")
def parameter_without_annotation(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, y) -> Tensor:
        return x + y


@mistake(ValueError, cause="No return type annotation", fix="such as -> Tensor")
def result_without_annotation(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor):
        return x.clone()


@mistake(
    ValueError, cause="unsupported default tensor([1.])", fix="use the default None, and create"
)
def tensor_as_default(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, weight: Tensor = torch.ones(1)) -> Tensor:  # noqa: B008  (the mistake)
        return x * weight


@mistake(TypeError, cause="is an async function", fix="Write def instead of async def")
def async_kernel(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    async def f(x: Tensor) -> Tensor:
        return x.clone()


@mistake(
    TypeError, cause="is a generator, because it contains yield", fix="Write return instead of"
)
def generator_kernel(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        yield x.clone()


@mistake(ValueError, cause="{'output'} in mutates_args were not found", fix="arguments are x, out")
def mutates_args_of_another_name(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=("output",))
    def f(x: Tensor, out: Tensor) -> None:
        out.copy_(x)


@mistake(ValueError, cause="expected a sequence of argument names", fix="mutates_args=('out',)")
def mutates_args_as_a_string(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args="out")
    def f(x: Tensor, out: Tensor) -> None:
        out.copy_(x)


@mistake(
    RuntimeError,
    cause="it mutates all tensor arguments",
    fix="Register the formula for a functional operator",
)
def unknown_mutation_with_a_formula(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args="unknown")
    def f(x: Tensor) -> Tensor:
        return x + 1

    f.register_autograd(lambda ctx, grad: grad)


@mistake(RuntimeError, cause="'gpu' is not a device type", fix="one such as 'cpu' or 'cuda'")
def device_type_that_is_none(n: str) -> None:
    scale_of(n, device_types="gpu")


@mistake(torchop.RedefinitionWarning, cause="is defined again", fix="Rename one of them")
def defined_twice(n: str) -> None:
    scale_of(n)

    @torchop.custom_op(f"{n}::scale", mutates_args=())
    def other(x: Tensor) -> Tensor:
        return x.clone()


@mistake(RuntimeError, cause="It was replaced by the definition at", fix="use that one")
def handle_of_an_older_definition(n: str) -> None:
    scale = scale_of(n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        defined_twice(n)
    scale(torch.ones(1))


@mistake(torchop.SchemaWarning, cause="a compiler would remove all calls", fix='"ordered"')
def nothing_but_an_effect(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor) -> None:
        print(x)


@mistake(TypeError, cause="is a torch.autograd.Function", fix="Remove this base class")
def class_that_is_an_autograd_function(n: str) -> None:
    @torchop.operator(f"{n}::f")
    class f(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:  # type: ignore[override]
            return x.clone()


@mistake(ValueError, cause="Remove 'ctx'", fix="setup_context(ctx, inputs, output)")
def forward_with_a_ctx(n: str) -> None:
    @torchop.operator(f"{n}::f")
    class f:
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()


@mistake(ValueError, cause="apply", fix="without 'ctx', and register the backward")
def apply_of_an_autograd_function(n: str) -> None:
    class Double(torch.autograd.Function):
        pass

    torchop.custom_op(f"{n}::double", Double.apply, mutates_args=())
