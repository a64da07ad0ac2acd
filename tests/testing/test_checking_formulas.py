"""Inside of a `checking` block, formulas that write to gradients or inputs raise an error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import torchop
from tests._support.common import counting, needs_native
from tests._support.releases import of_form
from tests.rules.support import save_inputs
from torchop import UndeclaredMutationError

GRADIENT = r"::op: the incoming gradient of output 0 was mutated: backward .* grad\.clone\(\)"


def halving(ctx, grad):
    return grad.mul_(0.5)


def define(namespace, backward=halving, setup_context=None, **options):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x / 2, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(backward, setup_context=setup_context, **options)
    return op


def of_class(namespace):
    class Operator:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x / 2

        backward = staticmethod(halving)

    return torchop.operator(f"{namespace}::op")(Operator)


def of_torch_library(namespace):
    op = torch.library.custom_op(
        f"{namespace}::op", lambda x: x / 2, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    torchop.register_autograd(op, halving)
    return op


def with_residuals(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Annotated[Tensor, torchop.Residuals(half=Tensor)]:
        return torchop.residuals(x / 2, torch.full_like(x, 0.5))

    def keep(ctx, inputs, output, residuals):
        ctx.save_for_backward(residuals.half)

    op.register_autograd(lambda ctx, grad: grad.mul_(ctx.saved_tensors[0]), setup_context=keep)
    return op


def inplace(namespace):
    def halve(x: Tensor) -> Tensor:
        return x.div_(2)

    op = torchop.custom_op(
        f"{namespace}::op",
        halve,
        mutates_args={"x"},
        **of_form("inplace", "(Tensor(a!) x) -> Tensor(a!)"),
    )
    op.register_autograd(halving)
    return lambda x: op(x.clone())


MAKERS: dict[str, Callable[[str], Any]] = {
    "formula": define,
    "contiguous": lambda namespace: define(namespace, contiguous_grads=True),
    "class": of_class,
    "torch_library": of_torch_library,
    "residuals": with_residuals,
    "inplace": inplace,
}


def differentiate(op: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    y = op(x)
    torch.autograd.grad(y, x, torch.ones(3))


def in_the_dispatcher(op: Any) -> None:
    with torchop.native.disabled():
        differentiate(op)


@pytest.mark.parametrize("call", [differentiate, in_the_dispatcher])
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_write_to_an_incoming_gradient_is_detected(namespace, make, called_before, call):
    op = make(namespace)
    if called_before:
        for _ in range(2):
            call(op)
    with (
        torchop.testing.checking(),
        pytest.raises(UndeclaredMutationError, match=namespace + GRADIENT),
    ):
        call(op)
    call(op)  # outside of the block, the write does not raise


def test_graph_recorded_before_the_block_is_checked(namespace):
    op = define(namespace)
    x = torch.ones(3, requires_grad=True)
    y = op(x)
    with torchop.testing.checking(), pytest.raises(UndeclaredMutationError, match=GRADIENT):
        torch.autograd.grad(y, x, torch.ones(3))


def test_other_threads_are_not_checked(namespace):
    op = define(namespace)
    with torchop.testing.checking(), ThreadPoolExecutor(1) as threads:
        threads.submit(differentiate, op).result()


def test_message_names_the_gradient_in_a_list(namespace):
    def rows(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x * 2, [x * 3, x * 4]

    op = torchop.custom_op(f"{namespace}::op", rows, mutates_args=())

    def backward(ctx, grad, grads):
        return 2 * grad + 3 * grads[0] + grads[1].mul_(4)

    op.register_autograd(backward)
    x = torch.ones(3, requires_grad=True)
    one, (two, three) = op(x)
    words = r"gradient of output 1\[1\] was mutated: backward changed its values, first at index"
    with torchop.testing.checking(), pytest.raises(UndeclaredMutationError, match=words):
        torch.autograd.grad([one, two, three], x, [torch.ones(3) for _ in range(3)])


def test_right_formulas_pass(namespace):
    def backward(ctx, grad, undefined):
        assert undefined is None
        (x,) = ctx.saved_tensors
        return grad.clone().mul_(x)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: (x * x / 2, x.clone()),
        schema="(Tensor x) -> (Tensor, Tensor)",
        mutates_args=(),
    )
    op.register_autograd(backward, setup_context=setup_context)
    x = torch.arange(3.0, requires_grad=True)
    with torchop.testing.checking():
        for loss in (torch.sum, lambda y: torch.cat([y, y]).sum()):
            for _ in range(2):
                torch.autograd.grad(loss(op(x)[0]), x)
        assert torch.func.grad(lambda x: op(x)[0].sum())(torch.arange(3.0)).tolist() == [0, 1, 2]


def test_write_outside_a_narrowed_gradient_is_detected(namespace):
    def backward(ctx, grad):
        grad.as_strided((1,), (1,), 0).fill_(7)
        return grad / 2

    op = define(namespace, backward)
    x = torch.ones(3, requires_grad=True)
    words = "backward wrote into its storage, outside the elements of this view"
    with torchop.testing.checking(), pytest.raises(UndeclaredMutationError, match=words) as caught:
        torch.autograd.grad(op(x), x, torch.ones(8)[2:5])
    assert "mutates_args" not in str(caught.value)


@pytest.mark.parametrize("make", [MAKERS["formula"], of_class])
def test_formula_in_a_transform_is_checked(namespace, make):
    op = make(namespace)
    with torchop.testing.checking(), pytest.raises(UndeclaredMutationError, match=GRADIENT):
        torch.func.grad(lambda x: (op(x) * torch.ones(3)).sum())(torch.ones(3))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_formula_compiled_in_the_block_is_checked(namespace, backend):
    op = define(namespace)
    compiled = torch.compile(lambda x: op(x) * 3, backend=backend, fullgraph=True)
    with torchop.testing.checking(), pytest.raises(BackendCompilerFailed, match=GRADIENT) as caught:
        differentiate(compiled)
    assert "UndeclaredMutationError" in str(caught.value)
    assert "values" not in str(caught.value)
    differentiate(compiled)


def test_backward_kernel_is_checked(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x / 2, schema="(Tensor x) -> Tensor", mutates_args=()
    )

    def kernel(grad: Tensor, x: Tensor) -> Tensor:
        grad.add_(1)
        return grad / 2

    op.register_autograd(backward_kernel=kernel)
    with torchop.testing.checking(), pytest.raises(UndeclaredMutationError) as caught:
        differentiate(op)
    assert "op__backward_kernel: Argument grad is not defined as mutable" in str(caught.value)
    assert "Write into a copy" in str(caught.value)
    assert "mutates_args" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# setup_context


def writes_into(what: str) -> Callable[..., None]:
    def setup_context(ctx, inputs, output):
        with torch.no_grad():
            (inputs[0] if what == "input 'x'" else output).add_(1)

    return setup_context


@pytest.mark.parametrize("call", [differentiate, in_the_dispatcher])
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("what", ["input 'x'", "output 0"])
def test_write_in_setup_context_is_detected(namespace, what, called_before, call):
    op = define(namespace, lambda ctx, grad: grad / 2, writes_into(what))
    if called_before:
        for _ in range(2):
            call(op)
    words = f"op: {what} was mutated: setup_context changed its values.*clone"
    with torchop.testing.checking(), pytest.raises(UndeclaredMutationError, match=words):
        call(op)
    call(op)


@pytest.mark.parametrize("called_before", [False, True])
def test_setup_context_with_residuals_is_checked(namespace, called_before):
    op = with_residuals(namespace)

    def setup_context(ctx, inputs, output, residuals):
        with torch.no_grad():
            output.add_(residuals.half)

    op.register_autograd(lambda ctx, grad: grad / 2, setup_context=setup_context)
    if called_before:
        for _ in range(2):
            differentiate(op)
    words = "op: output 0 was mutated: setup_context"
    with torchop.testing.checking(), pytest.raises(UndeclaredMutationError, match=words):
        differentiate(op)
    differentiate(op)


@needs_native
def test_calls_in_the_block_go_through_the_mode(namespace):
    op = define(namespace, lambda ctx, grad: grad / 2, save_inputs)
    with torchop.testing.checking():
        differentiate(op)
        with counting(op) as calls:
            differentiate(op)
    assert calls == {"mode": 1}
