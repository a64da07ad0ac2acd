import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import torchop
from tests.rules.autograd.derived.support import derived, one_tensor, sine
from tests.rules.support import leaf_of
from torchop import GradientError


def test_the_handle_says_that_its_formula_is_derived(namespace):
    assert "autograd derived" in repr(derived(f"{namespace}::f", sine))


def test_derived_and_registered_formulas_replace_each_other(namespace):
    op = derived(f"{namespace}::f", sine)
    x = leaf_of(0.5)
    op.register_autograd(lambda ctx, grad: 7 * grad)
    assert torch.autograd.grad(op(x), x)[0].item() == 7
    op.derive_autograd()
    assert_close(torch.autograd.grad(op(x), x)[0], x.cos())


def test_a_call_with_another_formula_is_not_differentiated_by_a_derived_one(namespace):
    op = torchop.custom_op(f"{namespace}::f", sine, mutates_args=())
    op.register_autograd(lambda ctx, grad: grad)
    y = op(leaf_of(0.5))
    op.derive_autograd()
    with pytest.raises(GradientError, match=f"{namespace}::f: this call was made while"):
        y.backward()


def test_a_call_outlives_another_derivation(namespace):
    op = derived(f"{namespace}::f", sine)
    x = leaf_of(0.5)
    y = op(x)
    op.derive_autograd()
    assert_close(torch.autograd.grad(y, x)[0], x.cos())


def test_tensors_without_data_have_gradients_without_data(namespace):
    op = derived(f"{namespace}::f", lambda x: x.sin() if x.mean() > 0 else x, **one_tensor)
    op.register_fake(like="x")
    x = torch.empty(2, 3, device="meta", requires_grad=True)
    op(x).sum().backward()
    assert (x.grad.shape, x.grad.device.type) == (x.shape, "meta")
    with FakeTensorMode():
        x = torch.empty(2, 3, requires_grad=True)
        op(x).sum().backward()
    assert (x.grad.shape, x.grad.device) == (x.shape, x.device)


def test_an_operator_that_mutates_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args={"x"})
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y).clone()

    with pytest.raises(GradientError, match=r"it mutates x, so the body cannot run again"):
        f.derive_autograd()
    assert "derived" not in repr(f)


def test_forms_use_the_functional_derived_formula_and_reject_their_own(namespace):
    op = derived(f"{namespace}::f", sine)
    in_place = op.derive_inplace()
    with pytest.raises(GradientError, match=r"Derive the formula of the functional operator"):
        in_place.derive_autograd()
    with pytest.raises(GradientError, match=r"out= forms have no gradients"):
        op.derive_out().derive_autograd()

    x = leaf_of(0.5, -1.0)
    y = x * 1
    in_place(y)
    y.sum().backward()
    assert_close(x.grad, x.detach().cos())


def test_operators_without_tensors_or_with_views_or_effects_are_refused(namespace):
    def count(x: Tensor) -> int:
        return 1

    def constant(n: int) -> Tensor:
        return torch.ones(n)

    for name, body, match in (
        ("a", count, "it returns no tensor"),
        ("b", constant, "it takes no tensor"),
    ):
        op = torchop.custom_op(f"{namespace}::{name}", body, mutates_args=())
        with pytest.raises(GradientError, match=match):
            op.derive_autograd()

    op = torchop.custom_op(f"{namespace}::c", sine, mutates_args=(), effects="ordered")
    with pytest.raises(GradientError, match="it has an effect, and the effect would happen again"):
        op.derive_autograd()

    op = derived(f"{namespace}::e", sine)
    op.register_effect("ordered")
    with pytest.raises(GradientError, match="an effect was registered after the formula"):
        op(leaf_of(0.5))

    view = torchop.custom_op(
        f"{namespace}::d", lambda x: x.view(-1), mutates_args=(), schema="(Tensor(a) x)->Tensor(a)"
    )
    with pytest.raises(GradientError, match="it returns views"):
        view.derive_autograd()


def test_a_name_that_is_taken_is_not_replaced(namespace):
    users_op = torchop.custom_op(f"{namespace}::f__backward", sine, mutates_args=())
    op = torchop.custom_op(f"{namespace}::f", sine, mutates_args=())
    with pytest.raises(GradientError, match=rf"needs an operator {namespace}::f__backward"):
        op.derive_autograd()
    assert_close(users_op(torch.ones(1)), torch.ones(1).sin())
    with pytest.raises(AttributeError):
        getattr(torch.ops, namespace).f__training  # noqa: B018  # reading the attribute raises
    assert "derived" not in repr(op)


def test_helper_operators_are_deregistered_with_the_operator(namespace):
    derived(f"{namespace}::f", sine)
    held = getattr(torch.ops, namespace).f__backward.default
    x = torch.ones(1)
    assert_close(held([x], None, [True], x), [x.cos()])

    with pytest.warns(torchop.RedefinitionWarning):
        torchop.custom_op(
            f"{namespace}::f", lambda x: x, schema="(Tensor x)->Tensor", mutates_args=()
        )
    with pytest.raises(torchop.OperatorGoneError, match=r"belongs to .*f, which was deregistered"):
        held([x], None, [True], x)
    assert not hasattr(getattr(torch.ops, namespace), "f__training")
