"""Formulas of operators that mutate an input in place, or mutate buffers without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchop
from tests._support.combinations import BACKENDS
from tests._support.common import counting, needs_native
from tests.integration.compile.graphs import fresh_compiler


def save_output(ctx: Any, inputs: Any, output: Any) -> None:
    assert inputs[0] is output
    ctx.save_for_backward(output, inputs[1])


@pytest.fixture
def scaled_exp_(namespace: str) -> Any:
    """Define exp(x * scale) in place. The gradient formula uses the new value of x."""

    @torchop.custom_op(
        f"{namespace}::exp_",
        mutates_args=("x",),
        schema="(Tensor(a!) x, Tensor scale) -> Tensor(a!)",
    )
    def exp_(x: Tensor, scale: Tensor) -> Tensor:
        return x.mul_(scale).exp_()

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        result, scale = ctx.saved_tensors
        return grad * result * scale, (grad * result * result.log() / scale).sum()

    exp_.register_autograd(backward, setup_context=save_output)
    return exp_


@pytest.fixture
def batch_norm(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::batch_norm", mutates_args=("running",))
    def batch_norm(x: Tensor, running: Tensor) -> Tensor:
        running.lerp_(x.mean(0), 0.5)
        return (x - running) ** 2

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, running = ctx.saved_tensors
        return 2 * grad * (x - running), None

    batch_norm.register_fake(lambda x, running: torch.empty_like(x))
    batch_norm.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: _save_with_copy(ctx, *inputs)
    )
    return batch_norm


def _save_with_copy(ctx: Any, x: Tensor, running: Tensor) -> None:
    ctx.save_for_backward(x, running.clone())


X = torch.tensor([0.5, -0.25, 0.125], dtype=torch.float64)
SCALE = torch.tensor(0.5, dtype=torch.float64)


@pytest.fixture
def compiling() -> Iterator[None]:
    with fresh_compiler():
        yield


def leaf(tensor: Tensor = X) -> Tensor:
    return tensor.detach().clone().requires_grad_()


# --------------------------------------------------------------------------------------------------
# In-place operators

PROGRAMS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "all of a tensor": lambda op, x, scale: op(x * 2, scale),
    "the mutated tensor is used": lambda op, x, scale: _mutated(op, x * 2, scale) ** 2,
    "a view": lambda op, x, scale: _part(op, x * 2, scale),
    "a view that was made before": lambda op, x, scale: _view_before(op, x * 2, scale),
    "twice": lambda op, x, scale: op(op(x * 2, scale) * 1, scale),
    "a tensor that required no grad": lambda op, x, scale: op(torch.ones_like(x), scale) * x,
}


def _mutated(op: Any, y: Tensor, scale: Tensor) -> Tensor:
    assert op(y, scale) is y
    return y


def _part(op: Any, y: Tensor, scale: Tensor) -> Tensor:
    op(y[1:], scale)
    return y * y


def _view_before(op: Any, y: Tensor, scale: Tensor) -> Tensor:
    view = y[1:]
    op(y, scale)
    return view * y[:2]


def reference(x: Tensor, scale: Tensor) -> Tensor:
    return x.mul_(scale).exp_()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_equal_pytorchs_in_place_operators(program: Any, scaled_exp_: Any) -> None:
    results = []
    for op in (scaled_exp_, reference):
        x, scale = leaf(), leaf(SCALE)
        result = program(op, x, scale)
        result.sum().backward()
        results.append((result.detach(), x.grad, scale.grad))
    assert_close(results[0], results[1])
    assert gradcheck(lambda x, scale: program(scaled_exp_, x, scale), (leaf(), leaf(SCALE)))
    assert gradgradcheck(lambda x, scale: program(scaled_exp_, x, scale), (leaf(), leaf(SCALE)))


def test_history_and_version_equal_pytorchs_operators(scaled_exp_: Any) -> None:
    y = leaf() * 2
    before = y.grad_fn
    scaled_exp_(y, SCALE)
    assert y.grad_fn is not before
    assert "exp_" in y.grad_fn.name()
    assert y.grad_fn.next_functions[0][0] is before
    buffer = torch.ones(3)
    scaled_exp_(buffer, torch.tensor(1.0, requires_grad=True))
    assert buffer.requires_grad
    assert not buffer.is_leaf


def test_mutation_of_a_tensor_saved_before_raises_in_backward(scaled_exp_: Any) -> None:
    y = leaf() * 2
    square = y * y
    scaled_exp_(y, SCALE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_recompute_the_operator(use_reentrant: bool, scaled_exp_: Any) -> None:
    def block(x: Tensor) -> Tensor:
        return scaled_exp_(x * 2, SCALE).sin()

    x, again = leaf(), leaf()
    block(x).sum().backward()
    checkpoint(block, again, use_reentrant=use_reentrant).sum().backward()
    assert_close(again.grad, x.grad)


def test_without_a_formula_only_backward_raises(namespace: str) -> None:
    @torchop.custom_op(
        f"{namespace}::sin_", mutates_args=("x",), schema="(Tensor(a!) x) -> Tensor(a!)"
    )
    def sin_(x: Tensor) -> Tensor:
        return x.sin_()

    y = leaf() * 1
    sin_(y)
    assert_close(y.detach(), X.sin())
    with pytest.raises(torchop.MissingFormulaError, match=f"{namespace}::sin_ but no autograd"):
        y.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_compiled_gradients_equal_eager(
    program: Any, scaled_exp_: Any, backend: str, compiling: None
) -> None:
    results = []
    for compiler in (lambda f: f, torch.compile(backend=backend, fullgraph=True)):
        x, scale = leaf(), leaf(SCALE)
        result = compiler(lambda x, scale: program(scaled_exp_, x, scale))(x, scale)
        result.sum().backward()
        results.append((result.detach(), x.grad, scale.grad))
    assert_close(results[1], results[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads `.grad` of every tensor
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_input_of_a_compiled_graph_gets_its_new_history(
    scaled_exp_: Any, backend: str, compiling: None
) -> None:
    def program(y: Tensor) -> Tensor:
        return scaled_exp_(y, SCALE) * 2

    gradients = []
    for run in (program, torch.compile(program, backend=backend, fullgraph=True)):
        x = leaf()
        y = x * 1
        result = run(y)
        (result.sum() + (y * y).sum()).backward()
        gradients.append(x.grad)
    assert_close(gradients[1], gradients[0])


# --------------------------------------------------------------------------------------------------
# Buffers without gradients


def test_a_formula_with_a_buffer(batch_norm: Any) -> None:
    def gradient(op: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        x = leaf(torch.arange(6.0, dtype=torch.float64).view(3, 2))
        running = torch.zeros(2, dtype=torch.float64)
        op(x, running).sum().backward()
        op(x, running).sum().backward()
        assert not running.requires_grad
        return x.grad, running

    def by_hand(x: Tensor, running: Tensor) -> Tensor:
        with torch.no_grad():
            running.lerp_(x.mean(0), 0.5)
        return (x - running.clone()) ** 2

    assert_close(gradient(batch_norm), gradient(by_hand))


@needs_native
def test_the_second_call_that_records_a_gradient_is_native(batch_norm: Any) -> None:
    x, running = leaf(torch.ones(3, 2)), torch.zeros(2)
    batch_norm(x, running)
    version = running._version
    with counting(batch_norm) as calls:
        batch_norm(x, running).sum().backward()
    assert calls == {"native": 1}
    assert running._version == version + 2  # one for the call, and one for `lerp_`
    with counting(batch_norm) as calls, pytest.raises(torchop.MutationError, match="'running'"):
        batch_norm(x, running * leaf(torch.ones(2)))
    assert calls == {"mutation": 1}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_updates_the_buffer(
    batch_norm: Any, backend: str, compiling: None
) -> None:
    def step(x: Tensor, running: Tensor) -> Tensor:
        return batch_norm(x * 2, running).sum()

    results = []
    for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
        x, running = leaf(torch.arange(6.0).view(3, 2)), torch.zeros(2)
        run(x, running).backward()
        run(x, running).backward()
        results.append((x.grad, running))
    assert_close(results[1], results[0])


REFUSED = {
    "nothing is returned": (
        "(Tensor(a!) x) -> ()",
        (),
        "it returns nothing",
    ),
    "all tensors are written": (
        "(Tensor(a!) x, Tensor(b!) y) -> Tensor",
        (),
        "it mutates all tensor arguments, and overwritten values have no gradient",
    ),
    "out=": (
        "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        (),
        "Out variants do not support autograd",
    ),
}


@pytest.mark.parametrize(("schema", "tags", "reason"), REFUSED.values(), ids=REFUSED)
def test_impossible_formula_is_rejected(
    schema: str, tags: Any, reason: str, namespace: str
) -> None:
    op = _define(namespace, schema, tags)
    with pytest.raises(RuntimeError, match=reason) as raised:
        op.register_autograd(lambda ctx, grad: grad)
    assert f"{namespace}::op" in str(raised.value)
    assert "functional operator" in str(raised.value)


def _define(namespace: str, schema: str, tags: Any) -> Any:
    names = [name for name in ("x", "y", "out") if f"!) {name}" in schema]
    function: Callable[..., Any] = {
        1: lambda x: None,
        2: lambda x, y: torch.empty_like(x),
        3: lambda x, *, out: out,
    }[3 if "out" in names else len(names)]
    return torchop.custom_op(
        f"{namespace}::op", function, mutates_args=names, schema=schema, tags=tags
    )


def test_an_input_that_is_overwritten_is_not_saved(namespace: str) -> None:
    @torchop.custom_op(
        f"{namespace}::mul_", mutates_args=("x",), schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    )
    def mul_(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    mul_.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[0], None), setup_context=save
    )
    y = leaf() * 1
    for other in (y, y.detach(), y.detach()[:1]):
        with pytest.raises(torchop.MutationError, match=r"and input 'y': they share memory.*clone"):
            mul_(y, other)
    assert_close(y.detach(), X)
    with torch.no_grad():
        mul_(y, y.detach())
    assert_close(y.detach(), X * X)


OVERLAPPING = {
    "detached": lambda buffer: buffer.detach(),
    "a part": lambda buffer: buffer.detach()[1:],
    "through NumPy": lambda buffer: torch.from_numpy(buffer.numpy()),
}


@pytest.fixture
def square(namespace: str) -> Any:
    """An operator that saves `x` and writes to `buffer`."""

    @torchop.custom_op(f"{namespace}::square", mutates_args=("buffer",))
    def square(x: Tensor, buffer: Tensor) -> Tensor:
        result = x * x
        buffer.add_(10)
        return result

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    square.register_fake(lambda x, buffer: torch.empty_like(x))
    square.register_autograd(
        lambda ctx, grad: (2 * ctx.saved_tensors[0] * grad, None), setup_context=save
    )
    return square


@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING)
def test_an_input_that_overlaps_a_buffer_is_not_saved(square: Any, make: Any) -> None:
    square(leaf(torch.ones(2)), torch.zeros(2))  # later calls may be native
    for call in (square, square._opoverload):
        buffer = torch.tensor([3.0, 4.0])
        x = make(buffer).requires_grad_()
        with pytest.raises(torchop.MutationError, match=r"'buffer' and input 'x': they share"):
            call(x, buffer)
        assert buffer.tolist() == [3.0, 4.0]
        with torch.no_grad():
            call(x, buffer)
        assert buffer.tolist() == [13.0, 14.0]


def test_an_input_next_to_a_buffer_is_saved(square: Any) -> None:
    for _ in range(2):
        memory = torch.tensor([3.0, 4.0, 5.0])
        x = memory.detach()[:1].requires_grad_()
        square(x, memory[1:]).sum().backward()
        assert x.grad.item() == 6
        assert memory.tolist() == [3, 14, 15]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_saves_no_overwritten_input(
    square: Any, backend: str, compiling: None
) -> None:
    def step(x: Tensor) -> Tensor:
        x = x * 1
        return square(x, x.detach())

    with pytest.raises(Exception, match=r"'buffer' and input 'x': they share memory"):
        torch.compile(step, backend=backend, fullgraph=True)(leaf(torch.ones(2)))
