import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.rules.autograd.derived.support import derived


def test_torch_func_differentiates_through_the_body(namespace):
    op = derived(
        f"{namespace}::f",
        lambda x: x**3 if x.sum() > 0 else -x,
        schema="(Tensor x)->Tensor",
    )
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert_close(torch.func.grad(lambda x: op(x).sum())(x), 3 * x**2)
    output, pull = torch.func.vjp(op, x)
    assert_close(output, x**3)
    assert_close(pull(torch.ones_like(x))[0], 3 * x**2)
    assert_close(torch.func.jacrev(op)(x), torch.diag(3 * x**2))
    assert_close(torch.func.jacrev(torch.func.jacrev(lambda x: op(x).sum()))(x), torch.diag(6 * x))
    assert_close(torch.autograd.functional.jacobian(op, x, vectorize=True), torch.diag(3 * x**2))


def test_arguments_left_out_are_no_part_of_a_batch(namespace):
    def body(x: Tensor, scale: float = 2.0) -> Tensor:
        return x.sin() * scale

    op = derived(f"{namespace}::f", body)
    op.register_vmap("sequential")
    xs = torch.rand(3, 2, dtype=torch.float64)
    for arguments in ((), (3.0,)):
        grads = torch.vmap(torch.func.grad(lambda x, a=arguments: op(x, *a).sum()))(xs)
        assert_close(grads, xs.cos() * (arguments or (2.0,))[0])


def test_a_batch_without_elements_has_gradients_without_elements(namespace):
    op = derived(f"{namespace}::f", lambda x, w: x * w, schema="(Tensor x, Tensor w) -> Tensor")
    op.register_fake(lambda x, w: torch.empty_like(x))
    op.register_vmap("sequential")
    of_one = torch.func.grad(lambda x, w: op(x, w).sum(), argnums=(0, 1))
    for size in (0, 3):
        grads = torch.vmap(of_one, in_dims=(0, None))(torch.rand(size, 2), torch.rand(2))
        assert [grad.shape for grad in grads] == [(size, 2), (size, 2)]


def test_forward_mode_differentiates_the_derived_backward(namespace):
    op = derived(f"{namespace}::f", lambda x: x**3, schema="(Tensor x) -> Tensor")
    op.register_jvp(
        lambda ctx, tangent: 3 * ctx.saved_tensors[0] ** 2 * tangent,
        setup_context=lambda ctx, inputs, output: ctx.save_for_forward(*inputs),
    )
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert_close(torch.func.hessian(lambda x: op(x).sum())(x), torch.diag(6 * x))
    assert torch.autograd.gradgradcheck(op, x.requires_grad_(), check_fwd_over_rev=True)


@pytest.mark.parametrize("has_rule", [True, False])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_element_of_a_batch(namespace, has_rule):
    def body(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (x * weight).sin() if x.sum() > 0 else x * weight.exp(), x.detach() * 2

    op = derived(f"{namespace}::f", body)

    def branches(x, weight):
        positive = (x.sum(-1, keepdim=True) > 0).expand_as(x)
        return torch.where(positive, (x * weight).sin(), x * weight.exp())

    if has_rule:

        @op.register_vmap
        def _(info, in_dims, x, weight):
            x = x.movedim(in_dims[0], 0)
            return (branches(x, weight), x.detach() * 2), (0, 0)

    xs = torch.tensor([[1.0, 2.0], [-1.0, -3.0], [0.5, 0.1]], dtype=torch.float64)
    weight = torch.tensor([0.3, 0.7], dtype=torch.float64)

    def both(function):
        of_one = torch.func.grad(lambda x, w: function(x, w).sum(), argnums=(0, 1))
        return torch.vmap(of_one, in_dims=(0, None))(xs, weight)

    assert_close(both(lambda x, w: op(x, w)[0]), both(branches))

    weight.requires_grad_()  # also differentiate through the transforms themselves
    ours = torch.autograd.grad(both(lambda x, w: op(x, w)[0])[0].sum(), weight)
    assert_close(ours, torch.autograd.grad(both(branches)[0].sum(), weight))
