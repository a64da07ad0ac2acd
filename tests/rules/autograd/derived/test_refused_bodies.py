"""Bodies that leave autograd, which a derived formula refuses in the backward."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.rules.autograd.derived.support import derived, each_strategy, sine
from tests.rules.support import leaf_of
from torchop import DerivedFormulaError

WAYS_OUT = r"Write the body in operators .* register_autograd\('.*opaque=True.*torch.no_grad\(\)"


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def through_detached_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def detached(x: Tensor) -> Tensor:
    return x.sin().detach() * 2


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def through_data(x: Tensor) -> Tensor:
    return x.data.exp()


@each_strategy
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (through_numpy, "numpy"),
        (through_detached_numpy, "left autograd in torch.Tensor.detach"),
        (detached, "left autograd in torch.Tensor.detach"),
        (without_grad, "left autograd in torch.Tensor.sin"),
        (through_data, "left autograd in torch.Tensor.data"),
    ],
)
def test_a_body_that_leaves_autograd_is_refused(namespace, body, problem, strategy):
    op = derived(f"{namespace}::f", body, strategy)
    x = leaf_of(0.5)
    with pytest.raises(DerivedFormulaError, match=rf"{namespace}::f: .*{problem}.*{WAYS_OUT}"):
        op(x).sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert op(x).shape == (1,)


def test_an_operator_without_a_formula_in_the_body_is_refused(namespace):
    inner = None

    def body(x: Tensor) -> Tensor:
        return inner(x) * 2

    for library in (torchop, torch.library):
        inner = library.custom_op(f"{namespace}::{library.__name__[-3:]}", sine, mutates_args=())

        op = derived(f"{namespace}::f{library.__name__[-3:]}", body)
        with pytest.raises(DerivedFormulaError, match="calls an operator without one"):
            op(leaf_of(0.5)).sum().backward()


@each_strategy
def test_outputs_that_are_detached_on_purpose_are_no_mistake(namespace, strategy):
    def with_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.detach().mean()

    op = derived(f"{namespace}::f", with_statistics, strategy)
    x = leaf_of(0.5)
    op(x)[0].sum().backward()
    assert_close(x.grad, x.detach().exp())


@each_strategy
def test_a_constant_chosen_by_a_detached_value_is_no_mistake(namespace, strategy):
    def body(x: Tensor) -> Tensor:
        return x * 2 if x.detach().abs().sum() > 1 else torch.zeros_like(x)

    op = derived(f"{namespace}::f", body, strategy)
    x = leaf_of(0.5)
    op(x).sum().backward()
    assert_close(x.grad, torch.zeros_like(x))


def test_an_error_of_the_body_is_passed_on(namespace):
    calls = []

    def body(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise KeyError("mine")
        return x.sin()

    op = derived(f"{namespace}::f", body)
    y = op(leaf_of(0.5))
    with pytest.raises(KeyError, match="mine"):
        y.backward()
