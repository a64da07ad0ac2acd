"""What a beginner writes wrongly, and whether the message alone tells them how to go on.

Each function makes one mistake, in the words of somebody who has not read the documentation. What
it raises has to name the operator, or the function that was to become one, the cause and the fix.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from torchop._compat import simulated_ranks

LONGEST = 400
INTERNAL = re.compile(
    r"_torchop|torchop\._|/torchop/|GeneratedBackward|\b_[a-z]+\.py\b|0x[0-9a-f]{6}"
)


class Mistake(NamedTuple):
    """What a beginner does, and what the message must have."""

    make: Callable[[str], Any]
    kind: type[BaseException]
    cause: str
    fix: str


MISTAKES: dict[str, Mistake] = {}


def mistake(
    kind: type[BaseException], *, cause: str, fix: str
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Enters a function of a namespace; `cause` and `fix` are words of the message."""

    def enter(make: Callable[[str], Any]) -> Callable[[str], Any]:
        MISTAKES[make.__name__] = Mistake(make, kind, cause, fix)
        return make

    return enter


def scale_of(n: str, **options: Any) -> Any:
    @torchop.custom_op(f"{n}::scale", mutates_args=(), **options)
    def scale(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    return scale


def multiply_of(n: str) -> Any:
    @torchop.custom_op(f"{n}::multiply", mutates_args=())
    def multiply(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    return multiply


# --------------------------------------------------------------------------------------------------
# Defining


@mistake(TypeError, cause="takes the name", fix='@torchop.custom_op("mylib::f", mutates_args=())')
def decorator_without_parentheses(n: str) -> None:
    @torchop.custom_op  # type: ignore[arg-type]
    def f(x: Tensor) -> Tensor:
        return x.clone()


@mistake(ValueError, cause="the name of an operator is a string", fix='("mylib::f", ...)')
def class_decorator_without_parentheses(n: str) -> None:
    @torchop.operator  # type: ignore[arg-type]
    class f:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()


@mistake(
    TypeError, cause="takes the name", fix='@torchop.custom_op("mylib::crop", mutates_args=())'
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


@mistake(ValueError, cause="'options' has unsupported type dict", fix="a dict[str, Tensor] or the")
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


@mistake(ValueError, cause="an operator takes no functions", fix="call it before or after")
def function_parameter(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        return activation(x)


@mistake(ValueError, cause="an operator takes no modules", fix="pass the tensors that it needs")
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


@mistake(ValueError, cause="unsupported default tensor([1.])", fix="default to None, and make it")
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
    RuntimeError, cause="it writes into all of its tensors", fix="Define a functional operator"
)
def unknown_mutation_with_a_formula(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args="unknown")
    def f(x: Tensor) -> Tensor:
        return x + 1

    f.register_autograd(lambda ctx, grad: grad)


@mistake(RuntimeError, cause="'gpu' is not a device type", fix="one such as 'cpu' or 'cuda'")
def device_type_that_is_none(n: str) -> None:
    scale_of(n, device_types="gpu")


@mistake(torchop.RedefinitionWarning, cause="is defined again", fix="Give one of them another name")
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


@mistake(torchop.MissingEffectWarning, cause="a compiler would remove its calls", fix='"ordered"')
def nothing_but_an_effect(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor) -> None:
        print(x)


# --------------------------------------------------------------------------------------------------
# Registering


@mistake(TypeError, cause="is called with (x, factor)", fix="Give it these parameters")
def fake_kernel_with_other_parameters(n: str) -> None:
    @scale_of(n).register_fake
    def _(x):
        return torch.empty_like(x)


@mistake(
    ValueError,
    cause="got unexpected type for op: function",
    fix="the handle that custom_op returned",
)
def fake_kernel_of_a_function(n: str) -> None:
    def mylib_scale(x):
        return 2 * x

    @torchop.register_fake(mylib_scale)  # type: ignore[arg-type]
    def _(x):
        return torch.empty_like(x)


@mistake(ValueError, cause="expected an operator", fix="register_fake('mylib::crop', ...)")
def fake_kernel_of_nothing(n: str) -> None:
    @torchop.register_fake  # type: ignore[arg-type]
    def _(x):
        return torch.empty_like(x)


@mistake(RuntimeError, cause="does not exist", fix="did you mean '{n}::scale'?")
def fake_kernel_with_a_typo(n: str) -> None:
    scale_of(n)

    @torchop.register_fake(f"{n}::scael")
    def _(x, factor):
        return torch.empty_like(x)


@mistake(TypeError, cause="by keyword only", fix="write setup_context=keep")
def setup_context_by_position(n: str) -> None:
    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    scale_of(n).register_autograd(lambda ctx, grad: (grad, None), keep)


@mistake(TypeError, cause="setup_context is called with (ctx, inputs, output)", fix="Give it these")
def setup_context_with_the_inputs(n: str) -> None:
    def keep(ctx, x):
        ctx.save_for_backward(x)

    scale_of(n).register_autograd(lambda ctx, grad: (grad, None), setup_context=keep)


@mistake(TypeError, cause="got the class Double", fix="Pass Double.backward, and setup_context=")
def formula_that_is_an_autograd_function(n: str) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    scale_of(n).register_autograd(Double)


@mistake(TypeError, cause="takes the device types first", fix="Write @register_kernel('cpu')")
def kernel_without_a_device(n: str) -> None:
    @scale_of(n).register_kernel
    def scale_on_cpu(x, factor):
        return x * factor


# --------------------------------------------------------------------------------------------------
# Calling


@mistake(TypeError, cause="Expected a value of type 'List[float]'", fix="scales=[...]")
def number_for_a_list(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, scales: list[float]) -> Tensor:
        return x * scales[0]

    f(torch.ones(1), 2.0)  # type: ignore[arg-type]


@mistake(TypeError, cause="instead found type 'int'", fix="y=torch.tensor(...)")
def number_for_a_tensor(n: str) -> None:
    multiply_of(n)(torch.ones(1), 2)


@mistake(TypeError, cause="instead found type 'ndarray'", fix="y=torch.from_numpy(...)")
def array_for_a_tensor(n: str) -> None:
    multiply_of(n)(torch.ones(1), np.ones(1))


@mistake(TypeError, cause="argument 'y' is None", fix="Pass a tensor")
def none_for_a_tensor(n: str) -> None:
    multiply_of(n)(torch.ones(1), None)


@mistake(TypeError, cause="instead found type 'Tensor'", fix="factor=tensor.item()")
def tensor_for_a_number(n: str) -> None:
    scale_of(n)(torch.ones(2), torch.ones(2))


@mistake(TypeError, cause="takes 1 positional argument(s) but 2", fix="Pass factor by keyword")
def keyword_only_argument_by_position(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=())
    def f(x: Tensor, *, factor: float) -> Tensor:
        return x * factor

    f(torch.ones(1), 2.0)  # type: ignore[misc]


@mistake(TypeError, cause="at most 2 argument(s) but received 3", fix="(Tensor x, float factor=2.)")
def too_many_arguments(n: str) -> None:
    scale_of(n)(torch.ones(1), 2.0, 3.0)


@mistake(TypeError, cause="missing value for argument 'y'", fix="(Tensor x, Tensor y)")
def too_few_arguments(n: str) -> None:
    multiply_of(n)(torch.ones(1))


@mistake(TypeError, cause="Unknown keyword argument 'facter'", fix="did you mean 'factor'?")
def keyword_with_a_typo(n: str) -> None:
    scale_of(n)(torch.ones(1), facter=3.0)


@mistake(NotImplementedError, cause="does not have a kernel registered for cpu", fix="('cpu')")
def kernel_for_another_device(n: str) -> None:
    scale_of(n, device_types="cuda")(torch.ones(1))


# --------------------------------------------------------------------------------------------------
# What a kernel does and returns


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


@mistake(TypeError, cause="must return None", fix="Leave out the return")
def kernel_returns_what_it_writes(n: str) -> None:
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

    with torchop.checking():
        f(torch.tensor([-1.0]))


@mistake(RuntimeError, cause="a leaf Variable that requires grad", fix="under torch.no_grad()")
def writing_into_a_parameter(n: str) -> None:
    @torchop.custom_op(f"{n}::f", mutates_args=("x",))
    def f(x: Tensor) -> None:
        x.add_(1)

    f(torch.nn.Parameter(torch.ones(1)))


# --------------------------------------------------------------------------------------------------
# Fake kernels and compilers


def compiled(function: Callable[[Tensor], Any], x: Tensor, backend: str = "eager") -> None:
    torch.compile(function, backend=backend, fullgraph=True)(x)


class Calls(torch.nn.Module):
    """A module that calls an operator, to be exported."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Any:
        return self.op(x)


@mistake(RuntimeError, cause="There was no fake impl registered", fix="return torch.empty_like(x)")
def compiling_without_a_fake_kernel(n: str) -> None:
    compiled(scale_of(n), torch.ones(1))


@mistake(
    RuntimeError, cause="There was no fake impl registered", fix="@torchop.register_fake('{n}::"
)
def exporting_without_a_fake_kernel(n: str) -> None:
    torch.export.export(Calls(scale_of(n)), (torch.ones(1),))


@mistake(RuntimeError, cause="the fake kernel read the data", fix="shapes, dtypes and devices only")
def fake_kernel_in_numpy(n: str) -> None:
    scale = scale_of(n)
    scale.register_fake(lambda x, factor: torch.from_numpy(x.numpy() * factor))
    compiled(scale, torch.ones(1))


@mistake(RuntimeError, cause="the fake kernel read the data", fix="new_dynamic_size()")
def exporting_a_size_that_depends_on_data(n: str) -> None:
    @torchop.custom_op(f"{n}::positive", mutates_args=())
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    positive.register_fake(lambda x: x.new_empty(len(x[x > 0].tolist())))
    torch.export.export(Calls(positive), (torch.ones(3),))


def checked_fake(n: str, fake: Callable[..., Any], x: Tensor) -> None:
    scale = scale_of(n)
    scale.register_fake(fake)
    torchop.opcheck(scale, (x,), test_utils="test_faketensor")


@mistake(torchop.OpCheckError, cause="Shapes torch.Size([2, 3]) and torch.Size([3])", fix="The ker")
def fake_kernel_of_another_shape(n: str) -> None:
    checked_fake(n, lambda x, factor: x.new_empty(3), torch.ones(2, 3))


@mistake(torchop.OpCheckError, cause="torch.float32 and torch.float64", fix="return the same from")
def fake_kernel_of_another_dtype(n: str) -> None:
    checked_fake(n, lambda x, factor: torch.empty_like(x, dtype=torch.double), torch.ones(2))


@mistake(torchop.OpCheckError, cause="Strides are (1, 3) and (2, 1)", fix="return the same from")
def fake_kernel_of_other_strides(n: str) -> None:
    checked_fake(n, lambda x, factor: x.new_empty(x.shape), torch.ones(2, 3).t())


@mistake(
    torchop.OpCheckError, cause="different in eager-mode", fix="Draw random numbers with torch"
)
def random_numbers_of_numpy(n: str) -> None:
    @torchop.custom_op(f"{n}::noise", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return x + float(np.random.rand())

    noise.register_fake(torch.empty_like)
    torchop.opcheck(noise, (torch.ones(2),), test_utils="test_aot_dispatch_dynamic")


@mistake(RuntimeError, cause="returns nothing and mutates nothing", fix='effects="ordered"')
def compiling_an_effect(n: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nothing_but_an_effect(n)
    compiled(getattr(torch.ops, n).f, torch.ones(1))


# --------------------------------------------------------------------------------------------------
# Gradients


def trained(n: str, backward: Callable[..., Any], keep: Any = None) -> Any:
    multiply = multiply_of(n)
    multiply.register_autograd(backward, setup_context=keep)
    x, y = torch.ones(2, 2, 3, requires_grad=True)
    return multiply(x, y).sum().backward()


@mistake(RuntimeError, cause="no autograd formula was registered", fix="register_autograd('{n}::")
def training_without_a_formula(n: str) -> None:
    multiply_of(n)(torch.ones(1, requires_grad=True), torch.ones(1)).backward()


@mistake(ValueError, cause="has no setup_context", fix="setup_context(ctx, inputs, output)")
def saved_tensors_without_setup_context(n: str) -> None:
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    trained(n, backward)


@mistake(ValueError, cause="saved no tensors", fix="add ctx.save_for_backward(...)")
def saved_tensors_that_nobody_saved(n: str) -> None:
    def keep(ctx, inputs, output):
        ctx.x, ctx.y = inputs

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    trained(n, backward, keep)


@mistake(AttributeError, cause="setup_context of", fix="add ctx.scale = ... there")
def attribute_that_nobody_set(n: str) -> None:
    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    trained(n, lambda ctx, grad: (grad * ctx.scale, grad), keep)


@mistake(TypeError, cause="backward is called with (ctx, grad_0)", fix="Give it these parameters")
def formula_without_ctx(n: str) -> None:
    trained(n, lambda grad: (grad, grad))


@mistake(
    TypeError, cause="incorrect number of gradients (expected 2, got 1)", fix="each input: x, y"
)
def one_gradient_for_two_inputs(n: str) -> None:
    trained(n, lambda ctx, grad: grad)


@mistake(TypeError, cause="(expected 2, got 1)", fix="Is a return statement missing?")
def gradients_that_are_not_returned(n: str) -> None:
    def backward(ctx, grad):
        grad, grad  # noqa: B018  (the mistake)

    trained(n, backward)


@mistake(TypeError, cause="expected the shape (2, 3), got (3,)", fix="has the shape of its input")
def gradient_of_another_shape(n: str) -> None:
    trained(n, lambda ctx, grad: (grad, grad.sum(0)))


@mistake(TypeError, cause="expected real numbers, got torch.complex64", fix=".real")
def gradient_of_another_dtype(n: str) -> None:
    trained(n, lambda ctx, grad: (grad, grad * 1j))


@mistake(TypeError, cause="expected a tensor on cpu, got one on meta", fix=".to('cpu')")
def gradient_on_another_device(n: str) -> None:
    trained(n, lambda ctx, grad: (grad, grad.to("meta")))


@mistake(TypeError, cause="wrong gradient for input 'x'", fix="expected a Tensor or None")
def gradient_that_is_an_array(n: str) -> None:
    trained(n, lambda ctx, grad: (grad.numpy(), grad))


@mistake(
    RuntimeError, cause="autograd cannot differentiate NumPy", fix="an operator that has a formula"
)
def second_derivative_through_numpy(n: str) -> None:
    multiply = multiply_of(n)

    @multiply.register_autograd
    def _(ctx, grad):
        return torch.from_numpy(grad.numpy() * 2), grad

    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(multiply(x, x) ** 2, x, create_graph=True)


@mistake(RuntimeError, cause="it read the data of a tensor", fix="opaque=True")
def compiling_a_formula_in_numpy(n: str) -> None:
    multiply = multiply_of(n)
    multiply.register_fake(lambda x, y: torch.empty_like(x))
    multiply.register_autograd(lambda ctx, grad: (torch.from_numpy(grad.numpy()), None))
    x = torch.ones(1, requires_grad=True)
    compiled(lambda x: multiply(x, torch.ones(1)).sum(), x, "aot_eager")


# --------------------------------------------------------------------------------------------------
# Transforms


@mistake(TypeError, cause="to have two returns, an output and out_dims", fix="out_dims (the dim")
def vmap_rule_without_out_dims(n: str) -> None:
    scale = scale_of(n)
    scale.register_vmap(lambda info, in_dims, x, factor: scale(x, factor))
    torch.vmap(scale)(torch.ones(2, 3))


@mistake(NotImplementedError, cause="no jvp formula", fix="register_jvp('{n}::scale', jvp")
def forward_mode_without_a_rule(n: str) -> None:
    torch.func.jvp(scale_of(n), (torch.ones(1),), (torch.ones(1),))


@mistake(ValueError, cause="got 'float16'", fix="such as torch.float16")
def autocast_to_a_string(n: str) -> None:
    scale_of(n).register_autocast("cpu", "float16")


@mistake(NotImplementedError, cause="has no sharding rule", fix="'{n}::scale', 'pointwise')")
def dtensors_without_a_rule(n: str) -> None:
    scale = scale_of(n)
    scale.register_fake(lambda x, factor: torch.empty_like(x))
    with simulated_ranks.simulated_mesh((2,)) as mesh:
        from torch.distributed.tensor import Shard, distribute_tensor

        scale(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))


# --------------------------------------------------------------------------------------------------
# What the messages say


class Said(NamedTuple):
    """What a beginner reads: the class of the exception or warning, its text and its notes."""

    kind: type[BaseException]
    text: str


# What the compiler writes around a message of ours. On 2.15, it quotes it.
_IN_A_COMPILER = re.compile(
    r"^\s*(?:torchop\.)?(\w+Error): (.*?)(?=^\s*Hint:|^Set |^ For more details|\Z)", re.M | re.S
)


def said(make: Callable[[str], Any], namespace: str) -> Said:
    """Makes the mistake, and returns what is raised or else warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        for kind in (torchop.RedefinitionWarning, torchop.MissingEffectWarning):
            warnings.simplefilter("always", kind)
        try:
            make(namespace)
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if type(error).__module__.startswith("torch._dynamo"):
                inner = _IN_A_COMPILER.search(text.replace("\\n", "\n").replace("\\'", "'"))
                assert inner is not None, text
                return Said(getattr(torchop, inner[1]), inner[2])
            return Said(type(error), text.partition("\nThe error above occurred when calling")[0])
    assert len(warned) == 1, "accepted in silence"
    return Said(warned[0].category, str(warned[0].message))


def explanation(text: str) -> str:
    """A message without the code that it shows, which stands indented on lines of its own."""
    lines = text.strip().splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("  "))


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_names_the_operator_the_cause_and_the_fix(name: str, namespace: str) -> None:
    make, kind, cause, fix = MISTAKES[name]
    message = said(make, namespace)
    assert issubclass(message.kind, kind), message
    assert cause.replace("{n}", namespace) in message.text
    assert fix.replace("{n}", namespace) in message.text
    # The operator, the function that was to be one, or where there is neither an example of a name.
    assert re.search(rf"\b{namespace}::|{name}\.<locals>|mylib::|'out'", message.text), message.text
    assert len(explanation(message.text)) < LONGEST, message.text
    assert not INTERNAL.search(message.text), message.text


def test_these_are_the_mistakes_of_a_beginner() -> None:
    assert len(MISTAKES) >= 52


def test_a_mistake_that_is_none_is_noticed(namespace: str) -> None:
    with pytest.raises(AssertionError, match="accepted in silence"):
        said(scale_of, namespace)


def test_what_looks_like_a_mistake_and_is_none(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def f(x: Tensor, sizes: list[int] = [], weight: Tensor = None) -> Tensor:  # type: ignore[assignment]  # noqa: B006
        sizes.append(len(sizes))
        return x * len(sizes) if weight is None else x * weight

    for _ in range(2):  # the default is in the schema, and a new list in each call
        assert f(torch.ones(1)) == 1
    assert f(torch.ones(1), weight=torch.full((1,), 3.0)) == 3
    assert scale_of(namespace)(torch.ones(1), np.float32(3)) == 3  # type: ignore[comparison-overlap]

    # A generator may be what returns a list.
    @torchop.custom_op(f"{namespace}::listed", mutates_args=())
    def listed(x: Tensor) -> list[Tensor]:
        yield x + 1

    assert [int(y) for y in listed(torch.ones(1))] == [2]
    # Autograd casts a gradient, and sums it over what it was broadcast by.
    x = torch.ones(1, 3, requires_grad=True)
    multiply = multiply_of(namespace)
    multiply.register_autograd(lambda ctx, grad: (grad.double(), None))
    multiply(x, torch.ones(2, 3)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 2.0, 2.0]]
    # An operator without a vmap rule is called once for each element.
    assert torch.vmap(scale_of(f"{namespace}_vmap"))(torch.ones(2, 3)).sum() == 12


def test_inductor_names_the_operator_of_a_wrong_fake_kernel(namespace: str) -> None:
    # The words are Inductor's; of ours is what `opcheck` says of the same operator.
    scale = scale_of(namespace)
    scale.register_fake(lambda x, factor: x.new_empty(3))
    with pytest.raises(AssertionError, match=rf"torch\.ops\.{namespace}\.scale\.default"):
        compiled(scale, torch.ones(2, 3), "inductor")
    with pytest.raises(torchop.OpCheckError, match="return the same from the fake kernel"):
        torchop.opcheck(scale, (torch.ones(2, 3),))
