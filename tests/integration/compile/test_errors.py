from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.integration.compile.graphs import BACKENDS

# Dynamo wraps an operator's exception in one of these. Since 2.14, under vmap, it also quotes the
# message inside another message.
FAILED = (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported)
quotes_once = pytest.mark.needs_torch("2.11", "Dynamo quotes errors once", before="2.14")


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_fake_kernel_the_error_names_the_operator_and_shows_one(namespace, backend):
    @torchop.custom_op(f"{namespace}::bare", mutates_args=())
    def bare(x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        return x * scale, x + scale

    with pytest.raises(FAILED) as caught:
        torch.compile(lambda x: bare(x, scale=2.0), backend=backend, fullgraph=True)(torch.ones(2))
    message = str(caught.value)
    assert f"There was no fake impl registered for {namespace}::bare" in message
    assert f"@torchop.register_fake('{namespace}::bare')" in message
    assert "def _(x, *, scale):" in message
    assert "return torch.empty_like(x), torch.empty_like(x)" in message
    assert "\\n" not in message  # the message must contain real line breaks, not escaped ones


def _with_numpy_backward(library: Any, namespace: str) -> Any:
    @library.custom_op(f"{namespace}::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(3 * x.detach().numpy() ** 2)

    cube.register_fake(lambda x: torch.empty_like(x))
    cube.register_autograd(backward, setup_context=setup_context)
    return cube


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_formula_that_cannot_be_traced_is_named_with_the_remedy(namespace, backend):
    cube = _with_numpy_backward(torchop, namespace)
    x = torch.tensor([2.0], requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: cube(x).sum(), backend=backend, fullgraph=True)(x)
    message = str(caught.value)
    assert f"{namespace}::cube: the backward formula cannot run in a compiler's trace" in message
    assert "backward_kernel=backward" in message


def test_the_remedy_for_a_formula_that_cannot_be_traced_works(namespace):
    cube = _with_numpy_backward(torchop, namespace)

    @torchop.custom_op(f"{namespace}::cube_backward", mutates_args=())
    def cube_backward(x: Tensor, grad: Tensor) -> Tensor:
        return grad * torch.from_numpy(3 * x.numpy() ** 2)

    cube_backward.register_fake(lambda x, grad: torch.empty_like(grad))
    cube.register_autograd(
        lambda ctx, grad: cube_backward(ctx.saved_tensors[0], grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = torch.tensor([2.0], requires_grad=True)
    torch.compile(lambda x: cube(x).sum(), backend="aot_eager", fullgraph=True)(x).backward()
    assert_close(x.grad, torch.tensor([12.0]))


_UNARY = "(Tensor x) -> Tensor"


class OwnError(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ValueError("one 'word'\ntwo"), ["one 'word'", "two ({})"]),
        (OwnError("one 'word'\ntwo"), ["one 'word'", "two ({})"]),
        (KeyError("a 'b'"), ["a 'b' ({})"]),
        (OwnError(), ["({})"]),
    ],
)
@pytest.mark.parametrize(
    "place",
    ["the fake kernel", "setup_context", pytest.param("the vmap rule", marks=quotes_once)],
)
def test_exception_of_a_users_function_is_shown_on_separate_lines(namespace, place, error, lines):
    op = torchop.custom_op(f"{namespace}::op", torch.clone, mutates_args=(), schema=_UNARY)

    def fails(*args, **kwargs):
        raise copy.copy(error)  # a copy, because torchop adds notes to it

    op.register_fake(fails if place == "the fake kernel" else torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad, setup_context=fails if place == "setup_context" else None
    )
    op.register_vmap(fails)
    call = torch.vmap(op) if place == "the vmap rule" else op
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as raised:
        torch.compile(lambda x: call(x), backend="eager", fullgraph=True)(
            torch.ones(2, 2, requires_grad=place == "setup_context")
        )
    told = [line.strip() for line in str(raised.value).splitlines()]
    (start,) = [n for n, line in enumerate(told) if line.endswith(f"got {type(error).__name__}(")]
    expected = [line.format(f"in {place} of {namespace}::op") for line in lines]
    shown = told[start + 1 : start + 1 + len(lines)]
    assert [line.partition(f", {__file__}")[0].rstrip(")") for line in shown] == [
        line.rstrip(")") for line in expected
    ]
    assert "\\n" not in str(raised.value)
