"""Derived formulas and backward kernels in compiled and exported programs."""

import io

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchop
from tests._support.devices import TYPE
from tests.integration.compile.graphs import AotRecorder, operators

each_backend = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def wave(name):
    @torchop.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x.sin() if x.mean() > 0 else x.cos()) * y, x.argmax()

    op.register_fake(lambda x, y: (torch.empty_like(x), x.new_empty((), dtype=torch.int64)))
    op.derive_autograd()
    return op


def dropout(name, **options):
    @torchop.custom_op(name, mutates_args=(), **options)
    def op(x: Tensor, p: float = 0.5) -> Tensor:
        return torch.nn.functional.dropout(x, p)

    op.register_fake(lambda x, p=0.5: torch.empty_like(x))
    op.derive_autograd()
    return op


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@each_backend
def test_compiled_training_has_the_gradients_of_eager_training(namespace, backend):
    op = wave(f"{namespace}::wave")

    def function(x, y):
        first, _ = op(x.exp() - 1, y)
        return (first * x).sum()

    for sign in (1, -1):
        x = (torch.rand(3, 4) * sign).requires_grad_()
        y = torch.rand(3, 4, requires_grad=True)
        found = torch.autograd.grad(compiled(function, backend)(x, y), (x, y))
        assert_close(found, torch.autograd.grad(function(x, y), (x, y)))


@each_backend
def test_shapes_may_be_symbolic_and_layouts_of_any_kind(namespace, backend):
    op = wave(f"{namespace}::wave")

    def function(x, y):
        return op(x.t(), y.expand(-1, 2))[0].sum()

    for size in (3, 6):
        x = torch.rand(2, size, requires_grad=True)
        y = torch.rand(size, 1, requires_grad=True)
        found = torch.autograd.grad(compiled(function, backend, dynamic=True)(x, y), (x, y))
        assert_close(found, torch.autograd.grad(function(x, y), (x, y)))


def test_a_graph_has_one_operator_forward_and_one_backward(namespace):
    op = wave(f"{namespace}::wave")
    recorder = AotRecorder()
    x, y = torch.rand(3, requires_grad=True), torch.rand(3)
    torch.compile(lambda x, y: op(x, y)[0] * 2, fullgraph=True, backend=recorder)(
        x, y
    ).sum().backward()
    names = [str(target) for target in operators(recorder.forward[0])]
    assert names.count(f"{namespace}.wave__training.default") == 1
    assert not any("sin" in name for name in names)
    names = [str(target) for target in operators(recorder.backward[0])]
    assert names.count(f"{namespace}.wave__backward.default") == 1
    assert not any("cos" in name for name in names)


def test_a_graph_without_gradients_has_the_operator_itself(namespace):
    op = wave(f"{namespace}::wave")
    recorder = AotRecorder()
    torch.compile(lambda x: op(x, x)[0], fullgraph=True, backend=recorder)(torch.rand(3))
    assert operators(recorder.forward[0]) == [op.overload]


# --------------------------------------------------------------------------------------------------
# Random numbers


@each_backend
def test_backward_reuses_the_forwards_random_numbers(namespace, backend):
    op = dropout(f"{namespace}::dropout", tags=torch.Tag.nondeterministic_seeded)

    def function(x):
        first = op(x)
        torch.rand(3)  # advances the random state, so that the two calls draw different numbers
        return first, op(x, 0.2)

    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    first, second = compiled(function, backend)(x)
    (of_first,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    assert torch.equal(of_first, first)
    state = torch.get_rng_state()
    (of_second,) = torch.autograd.grad(second.sum(), x)
    assert torch.equal(of_second, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_equal_calls_of_a_random_operator_are_not_merged(namespace):
    op = dropout(f"{namespace}::dropout", tags=torch.Tag.nondeterministic_seeded)
    x = torch.ones(100, requires_grad=True)
    first, second = compiled(lambda x: (op(x), op(x)))(x)
    assert not torch.equal(first, second)
    first.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, first)


def test_a_checkpoint_in_a_compiled_graph(namespace):
    op = wave(f"{namespace}::wave")

    def function(x, y):
        return checkpoint(lambda x: op(x, y)[0].exp() * x, x, use_reentrant=False).sum()

    x, y = torch.rand(3, requires_grad=True), torch.rand(3)
    (found,) = torch.autograd.grad(compiled(function)(x, y), x)
    assert_close(found, torch.autograd.grad(function(x, y), x)[0])


def test_a_checkpoint_in_a_compiled_graph_draws_the_same_numbers(namespace):
    # Define the operator without the tag nondeterministic_seeded, because a checkpoint must not
    # require the tag.
    op = dropout(f"{namespace}::dropout")
    x = torch.ones(64, requires_grad=True)

    def function(x):
        return checkpoint(lambda x: op(x.cos()) * x.sin(), x, use_reentrant=False)

    y = compiled(function)(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert_close(found, (y != 0) * 2 * (x.cos() ** 2 - x.sin() ** 2))


# --------------------------------------------------------------------------------------------------
# Transforms, export, autocast, lifetimes


def test_gradients_of_each_element_compile_with_a_vmap_rule(namespace):
    @torchop.custom_op(f"{namespace}::square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x * x

    square.register_fake(torch.empty_like)
    square.derive_autograd()
    square.register_vmap(lambda info, in_dims, x: (square(x), in_dims[0]))

    def function(x):
        return torch.vmap(torch.func.grad(lambda x: square(x).sum()))(x)

    x = torch.rand(3, 2)
    assert_close(compiled(function)(x), 2 * x)


def test_random_numbers_under_vmap_are_refused_when_compiled(namespace):
    op = dropout(f"{namespace}::dropout", tags=torch.Tag.nondeterministic_seeded)
    op.register_vmap(lambda info, in_dims, x, p: (op(x, p), in_dims[0]))
    function = torch.vmap(torch.func.grad(lambda x: op(x).sum()), randomness="different")
    x = torch.ones(3, 100)
    assert_close(function(x).unique(), torch.tensor([0.0, 2.0]))
    with pytest.raises(
        RuntimeError, match=r"Inside torch.vmap, a compiler cannot pass the generator state"
    ):
        compiled(function)(x)


def test_a_second_derivative_inside_a_compiled_graph_is_refused(namespace):
    op = wave(f"{namespace}::wave")

    def function(x):
        return torch.func.grad(torch.func.grad(lambda x: op(x, x)[0].sum()))(x)

    with pytest.raises(RuntimeError, match="a derived formula does not support double backward"):
        compiled(function)(torch.rand(()))


# When a process first loads a program, PyTorch 2.12 warns about a buffer that PyTorch itself
# created.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_an_exported_program_is_saved_loaded_and_trained(namespace):
    op = wave(f"{namespace}::wave")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(3))

        def forward(self, x):
            return op(self.weight, x)[0].sum()

    model, x = Model(), torch.rand(3)
    program = torch.export.export(model, (x,))
    assert operators(program.graph_module).count(op.overload) == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    loaded(x).backward()
    model(x).backward()
    assert_close(loaded.weight.grad, model.weight.grad)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_one_operator_forward_and_one_backward(namespace, tracing_mode):
    op = wave(f"{namespace}::wave")

    def train(x, y):
        return torch.autograd.grad(op(x, y)[0].sum(), (x, y))

    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    graph = make_fx(train, tracing_mode=tracing_mode)(x, y)
    names = [str(target) for target in operators(graph)]
    assert f"{namespace}.wave__training.default" in names
    assert f"{namespace}.wave__backward.default" in names
    assert_close(graph(-x.detach(), y.detach()), train(-x, y))


def test_compiled_autograd_runs_a_graph_recorded_in_eager_mode(namespace):
    op = dropout(f"{namespace}::dropout")
    x = torch.ones(100, requires_grad=True)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(compiler):
            y = op(x)
            x.grad = None
            y.sum().backward()
        assert_close(x.grad, y)


def test_compiled_autograd_trains_lists_and_several_results_in_one_graph(namespace):
    @torchop.custom_op(f"{namespace}::combine", mutates_args=())
    def combine(
        xs: list[Tensor], y: Tensor | None, p: float = 2.0, *, scale: float = 1.0
    ) -> tuple[Tensor, list[Tensor]]:
        total = torch.stack(xs).sum(0) * scale
        return total if y is None else total * y, [x**p for x in xs]

    def run(xs, y):
        product, powers = combine(xs, y, 3.0, scale=0.5)
        return product.sum() + powers[1].sum()

    combine.register_fake(lambda xs, y, p=2.0, *, scale=1.0: (xs[0] + 0, [x + 0 for x in xs]))
    combine.derive_autograd()
    xs, y = [torch.rand(3, requires_grad=True) for _ in range(2)], torch.rand(3, requires_grad=True)
    for given in (y, None):
        inputs = [*xs, *([] if given is None else [y])]
        expected = torch.autograd.grad(run(xs, given), inputs)
        for tensor in inputs:
            tensor.grad = None
        loss = run(xs, given)
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        with torch._dynamo.compiled_autograd._enable(compiler):
            loss.backward()
        assert_close([tensor.grad for tensor in inputs], list(expected))


def test_autocast_in_a_compiled_graph(namespace):
    @torchop.custom_op(f"{namespace}::product", mutates_args=())
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    product.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
    product.register_autocast(TYPE, torch.bfloat16)
    product.derive_autograd()

    def function(x, y):
        with torch.autocast(TYPE, torch.bfloat16):
            return product(x, y)

    x, y = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3)
    result = compiled(function)(x, y)
    assert result.dtype is torch.bfloat16
    result.sum().backward()
    assert_close(x.grad, torch.autograd.grad(function(x, y).sum(), x)[0])


def test_a_compiled_graph_of_a_deregistered_operator_raises(namespace):
    name = f"{namespace}::wave"
    op = wave(name)
    x = torch.rand(3, requires_grad=True)
    y = compiled(lambda x: op(x, x)[0])(x)
    with pytest.warns(torchop.RedefinitionWarning):
        torchop.custom_op(name, lambda x: x.clone(), schema="(Tensor x)->Tensor", mutates_args=())
    # The compiled graph either refers to the deregistered operator, which raises OperatorGoneError,
    # or looks it up in torch.ops, which raises AttributeError.
    with pytest.raises((torchop.OperatorGoneError, AttributeError), match="wave__backward"):
        y.sum().backward()


def test_a_body_that_leaves_autograd_is_refused_in_the_compiled_backward(namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    op.register_fake(torch.empty_like)
    op.derive_autograd()
    y = compiled(op)(torch.rand(3, requires_grad=True))
    with pytest.raises(torchop.GradientError, match=r"left autograd in torch.Tensor.detach"):
        y.sum().backward()


def test_a_backward_kernel_with_inductor_and_symbolic_shapes(namespace):
    @torchop.custom_op(f"{namespace}::cube", mutates_args=())
    def cube(x: Tensor, scale: float) -> Tensor:
        return x**3 * scale

    cube.register_fake(lambda x, scale: torch.empty_like(x))

    def backward(grad: Tensor, x: Tensor, scale: float) -> Tensor:
        gradient = torch.from_numpy(grad.numpy() * 3 * x.numpy() ** 2 * scale)
        return torch.empty_like(x).copy_(gradient)

    cube.register_autograd(backward_kernel=backward)
    function = compiled(lambda x: cube(x.t(), 3.0), "inductor", dynamic=True)
    for size in (2, 5):
        x = torch.randn(3, size, requires_grad=True)
        function(x).sum().backward()
        assert_close(x.grad, 9 * x.detach() ** 2)
