"""The gradients of a derived formula equal the gradients that autograd computes for the body."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from .derived_bodies import BODIES, differentiable_outputs, operator, spread

each_body = pytest.mark.parametrize("name", BODIES)


def prepared(namespace, name):
    """Return a body, its operator, its input tensors, and a function that builds the arguments.

    The function takes replacements for the input tensors.
    """
    body = BODIES[name]
    return body, operator(f"{namespace}::{name}", body.function), *spread(body.inputs())


def gradients(function, tensors, arrange):
    torch.manual_seed(3)
    outputs = differentiable_outputs(function(*arrange(*tensors)))
    weighted = sum((output * torch.randn_like(output)).sum() for output in outputs)
    if not weighted.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    gradients = torch.autograd.grad(weighted, tensors, allow_unused=True)
    pairs = zip(tensors, gradients, strict=True)
    return [torch.zeros_like(t) if g is None else g for t, g in pairs]


@pytest.fixture(autouse=True)
def _same_inputs():
    torch.manual_seed(11)


@each_body
def test_gradients_equal_those_of_the_plain_body(namespace, name):
    body, op, tensors, arrange = prepared(namespace, name)
    assert_close(
        gradients(op, tensors, arrange), gradients(body.function, tensors, arrange), rtol=0, atol=0
    )


@each_body
def test_first_and_second_derivatives_match_finite_differences(namespace, name):
    _, op, tensors, arrange = prepared(namespace, name)

    def function(*inputs):
        return tuple(differentiable_outputs(op(*arrange(*inputs))))

    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


# Compiling takes most of the time, so only exhaustive runs compile all bodies. Normal runs compile
# every third body.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if number % 3 else [])
        for number, name in enumerate(BODIES)
    ],
)
def test_compiled_gradients_match_finite_differences(namespace, name):
    body, op, tensors, arrange = prepared(namespace, name)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(*inputs):
        return tuple(differentiable_outputs(op(*arrange(*inputs))))

    def plainly(*inputs):
        return differentiable_outputs(body.function(*arrange(*inputs)))

    assert gradcheck(function, tensors, fast_mode=True)
    assert_close(
        gradients(lambda *inputs: list(function(*inputs)), tensors, lambda *inputs: inputs),
        gradients(lambda *inputs: plainly(*inputs), tensors, lambda *inputs: inputs),
    )
