"""Backward kernels: operators that compute gradients, and whose parameters name saved tensors."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.devices import TYPE
from torchop import MissingFormulaError, RuleSignatureError


def forward(x: Tensor, w: Tensor | None = None, scale: float = 1.0) -> Tensor:
    y = x * scale if w is None else x * w * scale
    return torchop.residuals(y.logsumexp(-1), y.softmax(-1))


def fake(x, w=None, scale=1.0):
    return torchop.residuals(x.new_empty(x.shape[:-1]), torch.empty_like(x))


def in_numpy(
    grad: Tensor, x: Tensor, w: Tensor | None, softmax: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    product = torch.from_numpy(grad.numpy()[..., None] * softmax.numpy() * np.float32(scale))
    return (product.clone(), None) if w is None else (product * w, product * x)


def define(namespace, kernel=in_numpy):
    op = torchop.custom_op(
        f"{namespace}::op", forward, mutates_args=(), residuals={"softmax": Tensor}
    )
    op.register_fake(fake)
    op.register_autograd(backward_kernel=kernel)
    return op


def gradients_of(function, *values):
    inputs = [value for value in values if isinstance(value, Tensor)]
    return torch.autograd.grad(function(*values).sum(), inputs)


X, W = (torch.arange(12.0).reshape(4, 3).sin() + n for n in range(2))


@pytest.mark.parametrize("values", [(X, W, 2.0), (X,), (X, W)], ids=["all", "one", "default"])
def test_gradients(namespace, values):
    op = define(namespace)
    values = [v.clone().requires_grad_() if isinstance(v, Tensor) else v for v in values]
    expected = gradients_of(lambda *args: forward(*args).output, *values)
    compiled = torch.compile(
        lambda *args: op(*args), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for function in (op, op, compiled):
        for gradient, right in zip(gradients_of(function, *values), expected, strict=True):
            assert_close(gradient, right)


def test_the_kernel_is_an_operator(namespace):
    op = define(namespace)
    name = f"{namespace}::op__backward_kernel"
    schema = "(Tensor grad, Tensor x, Tensor? w, Tensor softmax, float scale) -> (Tensor, Tensor)"
    assert schema in str(getattr(torch.ops, namespace).op__backward_kernel.default._schema)
    ran = []

    @torchop.register_kernel(name, "cpu")
    def kernel(grad, x, w, softmax, scale):
        ran.append(scale)
        return in_numpy(grad, x, w, softmax, scale)

    x = X.clone().requires_grad_()
    with torch.profiler.profile() as profile:
        gradients_of(op, x)
    assert ran == [1.0]
    assert name in {event.key for event in profile.key_averages()}
    assert_close(torch.func.vmap(torch.func.grad(op))(X), X.softmax(-1))


def test_a_second_derivative_needs_a_formula_of_the_kernel(namespace):
    def square(x: Tensor) -> Tensor:
        return x * x

    def slope(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * x * grad

    op = torchop.custom_op(f"{namespace}::op", square, mutates_args=())
    op.register_autograd(backward_kernel=slope)
    x = torch.tensor([3.0], requires_grad=True)

    def second():
        (gradient,) = torch.autograd.grad(op(x), x, create_graph=True)
        return torch.autograd.grad(gradient, x)[0]

    with pytest.raises(MissingFormulaError, match=r"register_autograd\('.*op__backward_kernel'"):
        second()
    torchop.register_autograd(
        f"{namespace}::op__backward_kernel",
        lambda ctx, grad: (2 * ctx.saved_tensors[1] * grad, 2 * ctx.saved_tensors[0] * grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert second() == 2


def test_the_output_and_several_results(namespace):
    def waves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.exp()

    def kernel(first: Tensor, second: Tensor, x: Tensor, output_1: Tensor) -> Tensor:
        return first * x.cos() + second * output_1

    op = torchop.custom_op(f"{namespace}::op", waves, mutates_args=())
    op.register_autograd(backward_kernel=kernel)
    x = torch.tensor([0.5], requires_grad=True)
    for index, expected in enumerate((x.cos(), x.exp())):
        assert_close(torch.autograd.grad(op(x)[index], x)[0], expected.detach())


def powers(xs: list[Tensor], y: Tensor, *, n: int = 2) -> tuple[list[Tensor], Tensor]:
    squares = [x**n for x in xs]
    return torchop.residuals((squares, sum(squares) * y), [n * x ** (n - 1) for x in xs])


def of_powers(
    grads: list[Tensor], grad: Tensor, output_0: list[Tensor], slopes: list[Tensor], y: Tensor
) -> tuple[list[Tensor] | None, Tensor]:
    of_xs = [(each + grad * y) * slope for each, slope in zip(grads, slopes, strict=True)]
    return of_xs, grad * sum(output_0)


def test_lists(namespace):
    residuals = {"slopes": list[Tensor]}
    op = torchop.custom_op(f"{namespace}::op", powers, mutates_args=(), residuals=residuals)
    op.register_fake(lambda xs, y, *, n=2: powers(xs, y, n=n))
    op.register_autograd(backward_kernel=of_powers)
    torchop.register_fake(
        f"{namespace}::op__backward_kernel",
        lambda grads, grad, output_0, slopes, y: ([g + 0 for g in grads], y + 0),
    )
    xs = [v.clone().requires_grad_(needs) for v, needs in ((X, True), (W, False), (W * 2, True))]
    y = W.clone().requires_grad_()

    def loss(function):
        several, one = function(xs, y, n=3)
        return (several[0] * 2).sum() + one.sum()

    wanted = [xs[0], xs[2], y]
    expected = torch.autograd.grad(loss(lambda *a, **k: powers(*a, **k).output), wanted)
    compiled = torch.compile(lambda *a, **k: op(*a, **k), fullgraph=True, backend="aot_eager")
    for function in (op, op, compiled):
        assert_close(torch.autograd.grad(loss(function), wanted), expected)


def test_a_list_whose_gradient_is_none(namespace):
    def first(xs: list[Tensor], y: Tensor) -> Tensor:
        return y * 2

    def kernel(grad: Tensor, xs: list[Tensor]) -> tuple[list[Tensor] | None, Tensor]:
        return None, grad * 2

    op = torchop.custom_op(f"{namespace}::op", first, mutates_args=())
    op.register_autograd(backward_kernel=kernel)
    xs, y = [X.clone().requires_grad_() for _ in range(2)], X.clone().requires_grad_()
    gradients = torch.autograd.grad(op(xs, y).sum(), [*xs, y])
    assert [gradient.unique().item() for gradient in gradients] == [0, 0, 2]


@dataclass
class Config:
    scale: Tensor
    power: int


@dataclass
class Tapes:
    powers: Tensor
    nothing: Tensor | None = None


Returned = Annotated[Tensor, torchop.Residuals(tapes=Tapes)]


def structured(x: Tensor, config: Config, *, bias: float = 0.0) -> Returned:
    tape = x**config.power
    return torchop.residuals(tape * config.scale + bias, Tapes(tape))


def of_structured(
    grad: Tensor, x: Tensor, config: Config, tapes: Tapes, *, bias: float
) -> tuple[Tensor, Tensor]:
    assert bias == 5.0
    assert tapes.nothing is None
    slope = config.power * x ** (config.power - 1) * config.scale
    return grad * slope, grad * tapes.powers


def test_structures(namespace):
    op = torchop.custom_op(f"{namespace}::op", structured, mutates_args=())
    op.register_fake(structured)
    op.register_autograd(backward_kernel=of_structured)
    name = f"{namespace}::op__backward_kernel"
    x, scale = X.clone().requires_grad_(), W.clone().requires_grad_()

    def run(function):
        return torch.autograd.grad(function(x, Config(scale, 3), bias=5.0).sum(), [x, scale])

    expected = run(lambda *a, **k: structured(*a, **k).output)
    compiled = torch.compile(lambda *a, **k: op(*a, **k), fullgraph=True, backend="aot_eager")
    for function in (op, op, compiled):
        assert_close(run(function), expected)
    ran = []

    @torchop.register_kernel(name, TYPE)
    def kernel(grad, x, config, tapes, *, bias):
        ran.append((type(config), type(tapes)))
        return of_structured(grad, x, config, tapes, bias=bias)

    assert_close(run(op), expected)
    assert ran == [(Config, Tapes)]


@pytest.mark.parametrize("provider", [None, "numpy"])
def test_none_stands_for_zeros_in_kernels_that_are_registered(namespace, provider):
    op, ran = define(namespace), []

    def kernel(grad, x, w, softmax, scale):
        ran.append(scale)
        return in_numpy(grad, x, None, softmax, scale)

    name = f"{namespace}::op__backward_kernel"
    torchop.register_kernel(name, "cpu", kernel, provider=provider)
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    expected = kernel(torch.ones(4), X, None, (X * W).softmax(-1), 1.0)[0]
    with torchop.priority({name: [provider]} if provider else {}):
        for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
            assert_close(gradients_of(function, x, w), (expected, torch.zeros(4, 3)))
    assert len(ran) == 3


def test_another_kernel_replaces_the_one_before(namespace):
    op = define(namespace)

    def doubled(grad: Tensor, x: Tensor, softmax: Tensor) -> tuple[Tensor, Tensor | None]:
        return 2 * grad.unsqueeze(-1) * softmax, None

    op.register_autograd(backward_kernel=doubled)
    x = X.clone().requires_grad_()
    assert_close(gradients_of(op, x)[0], 2 * X.softmax(-1))


def test_an_operator_of_another_library_is_redefined(namespace):
    def triple(grad: Tensor) -> Tensor:
        return grad * 3

    def multiply(grad: Tensor, n: int) -> Tensor:
        return grad * n

    for arguments, kernel, values in (("", triple, ()), (", int n", multiply, (5,))):
        with torchop.Library(namespace, "FRAGMENT") as library:
            library.define(f"op(Tensor x{arguments}) -> Tensor")
            library.impl("op", lambda x, *_: x.clone(), "CompositeExplicitAutograd")
            torchop.register_autograd(f"{namespace}::op", backward_kernel=kernel)
            x = torch.ones(2, requires_grad=True)
            getattr(torch.ops, namespace).op(x, *values).sum().backward()
            assert x.grad.tolist() == [values[0] if values else 3.0] * 2


# A cached graph would contain a backward that was compiled with the previous kernel.
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_a_backward_runs_the_kernel_that_was_registered_after_its_forward(namespace, backend):
    op = define(namespace)
    function = op
    if backend is not None:  # the backward is compiled when it first runs, so with the new kernel
        function = torch.compile(lambda *args: op(*args), fullgraph=True, backend=backend)
    x, w = (each.clone().requires_grad_() for each in (X, W))
    before = gradients_of(op, x, w)
    output = function(x, w).sum()

    def doubled(
        grad: Tensor, x: Tensor, w: Tensor | None, softmax: Tensor, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        gradients = in_numpy(grad, x, w, softmax, scale)
        return 2 * gradients[0], 2 * gradients[1]

    op.register_autograd(backward_kernel=doubled)
    expected = tuple(2 * each for each in before)
    assert_close(torch.autograd.grad(output, (x, w)), expected)
    assert_close(gradients_of(function, x, w), expected)


# --------------------------------------------------------------------------------------------------
# Kinds of operators


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def scaled_sum(xs: list[Tensor | None], by: float) -> Tensor:
    return sum(x * by for x in xs if x is not None)


@pytest.mark.parametrize("are_none", [True, False])
def test_list_with_some_none(namespace, are_none):
    def kernel(grad: Tensor, xs: list[Tensor | None], by: float) -> list[Tensor | None]:
        # The first input is None. The gradient of the third is zero, which None also represents.
        return [None, torch.as_tensor(grad.numpy() * by), None]

    op = torchop.custom_op(f"{namespace}::op", scaled_sum, mutates_args=())
    op.register_fake(lambda xs, by: torch.empty_like(xs[1]))
    op.register_autograd(backward_kernel=kernel)
    op.register_vmap("sequential")
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()

    def function(f):
        return torch.autograd.grad(f([None, x, None if are_none else y], 2.0).sum(), [x])

    for f in (op, op, compiled(lambda xs, by: op(xs, by))):
        assert_close(function(f), (torch.full_like(X, 2),))
    of_one = torch.func.grad(lambda x: op([None, x, None], 3.0).sum())
    assert_close(torch.vmap(of_one)(X), torch.full_like(X, 3))


def test_an_optional_list(namespace):
    def forward(x: Tensor, ws: list[Tensor] | None, index: Tensor) -> Tensor:
        return x * 2 if ws is None else x * ws[0]

    def kernel(
        grad: Tensor, x: Tensor, ws: list[Tensor] | None, index: Tensor
    ) -> tuple[Tensor, list[Tensor | None] | None, Tensor | None]:
        if ws is None:
            return torch.from_numpy(grad.numpy() * 2), None, None
        return grad * ws[0], [grad * x, None], None

    op = torchop.custom_op(f"{namespace}::op", forward, mutates_args=())
    op.register_fake(lambda x, ws, index: torch.empty_like(x))
    op.register_autograd(backward_kernel=kernel)
    x, one, two = (X.clone().requires_grad_() for _ in range(3))
    index = torch.tensor([1])
    for f in (op, op, compiled(lambda *args: op(*args))):
        assert_close(torch.autograd.grad(f(x, None, index).sum(), x)[0], torch.full_like(X, 2))
        gradients = torch.autograd.grad(f(x, [one, two], index).sum(), (x, one, two))
        assert_close(gradients, (X, X, torch.zeros_like(X)))


@pytest.mark.parametrize("is_there", [True, False])
def test_results_that_are_optional_or_numbers(namespace, is_there):
    schema = "(Tensor x, bool is_there) -> (Tensor?, Tensor, int)"

    def forward(x, is_there):
        return (x * 2 if is_there else None), x * 3, 5

    def kernel(grad_0: Tensor | None, grad_1: Tensor, x: Tensor, output_2: int) -> Tensor:
        assert output_2 == 5
        second = torch.from_numpy(grad_1.numpy() * 3)
        return second if grad_0 is None else second + 2 * grad_0

    op = torchop.custom_op(f"{namespace}::op", forward, schema=schema, mutates_args=())
    op.register_fake(forward)
    op.register_autograd(backward_kernel=kernel)
    x = X.clone().requires_grad_()
    for f in (op, op, compiled(lambda *args: op(*args))):
        loss = sum(value.sum() for value in f(x, is_there)[:2] if value is not None)
        (gradient,) = torch.autograd.grad(loss, x)
        assert_close(gradient, torch.full_like(X, 5 if is_there else 3))


def test_a_tuple_of_one_result(namespace):
    def forward(x: Tensor) -> tuple[Tensor]:
        return (x * 2,)

    def kernel(grad: Tensor, x: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)

    op = torchop.custom_op(f"{namespace}::op", forward, mutates_args=())
    op.register_fake(lambda x: (torch.empty_like(x),))
    op.register_autograd(backward_kernel=kernel)
    x = X.clone().requires_grad_()
    for f in (op, op, compiled(op)):
        assert_close(torch.autograd.grad(f(x)[0].sum(), x)[0], torch.full_like(X, 2))


def test_operators_that_write(namespace):
    def kernel(grad: Tensor, x: Tensor, by: float) -> Tensor:
        return torch.from_numpy(grad.numpy() * by)

    in_place = torchop.custom_op(
        f"{namespace}::scale_",
        lambda x, by: x.mul_(by),
        schema="(Tensor(a!) x, float by) -> Tensor(a!)",
        mutates_args={"x"},
    )
    in_place.register_autograd(backward_kernel=kernel)
    counted = torchop.custom_op(
        f"{namespace}::counted",
        lambda x, by, count: (count.add_(1), x * by)[1],
        schema="(Tensor x, float by, Tensor(a!) count) -> Tensor",
        mutates_args={"count"},
    )
    counted.register_fake(lambda x, by, count: torch.empty_like(x))

    def of_counted(grad: Tensor, x: Tensor, by: float) -> tuple[Tensor, Tensor | None]:
        return kernel(grad, x, by), None

    counted.register_autograd(backward_kernel=of_counted)
    x, count = X.clone().requires_grad_(), torch.zeros(2)
    for function in (lambda x: in_place(x * 1, 3.0), lambda x: counted(x, 3.0, count)):
        for f in (function, function, compiled(function)):
            assert_close(torch.autograd.grad(f(x).sum(), x)[0], torch.full_like(X, 3))
    assert count[0] == 3


# --------------------------------------------------------------------------------------------------
# Mistakes


def no_place(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]: ...
def too_few(grad: Tensor, x: Tensor) -> Tensor: ...
def no_types(grad, x) -> tuple[Tensor, Tensor]: ...
def returns_numbers(grad: Tensor, x: Tensor) -> tuple[Tensor, float]: ...
def returns_a_list(grad: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]: ...
def takes_a_list(grads: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]: ...
def takes_a_number(grad: float, x: Tensor) -> tuple[Tensor, Tensor]: ...
def takes_nothing() -> tuple[Tensor, Tensor]: ...


WRONG = {
    no_place: "the parameter 'y' is not an argument, a residual or the output",
    too_few: r"return a Tensor for each tensor argument \(x, w\)",
    no_types: "parameter 'grad' must have a type annotation",
    returns_numbers: r"return a Tensor for each tensor argument \(x, w\)",
    returns_a_list: r"list\[Tensor \| None\]\. Got tuple\[torch.Tensor, list",
    takes_a_list: r"the first parameters must be the gradients of the results, annotated",
    takes_a_number: r"the first parameters must be the gradients of the results, annotated",
    takes_nothing: "takes 0 arguments, but it is called with one gradient for each result",
}


@pytest.mark.parametrize("kernel", WRONG, ids=lambda kernel: kernel.__name__)
def test_wrong_kernels(namespace, kernel):
    with pytest.raises(RuleSignatureError, match=WRONG[kernel]):
        define(namespace, kernel)
    assert not hasattr(getattr(torch.ops, namespace), "op__backward_kernel")


def test_a_kernel_with_a_formula_is_rejected(namespace):
    op = define(namespace)
    with pytest.raises(RuleSignatureError, match="takes a backward_kernel, or backward"):
        op.register_autograd(lambda ctx, grad: grad, backward_kernel=in_numpy)
