"""Derived formulas save the right tensors, and graphs with them can be used again.

Uses private names.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import torchop
from tests._support.devices import TYPE
from tests.rules.autograd.derived.support import derived, sine
from tests.rules.support import leaf_of
from torchop._rules.autograd.derived.replay import ambient_state


def saved_bytes(op, x):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.append(t.numel() * t.element_size()), t)[1], lambda t: t
    ):
        result = op(x)
    return sum(sizes), result


def chain(x: Tensor) -> Tensor:
    for _ in range(5):
        x = x.sin()
    return x


def test_a_call_saves_the_inputs_and_the_state(namespace):
    x = torch.ones(1000, requires_grad=True)
    saved, result = saved_bytes(derived(f"{namespace}::f", chain), x)
    assert saved == 4000 + ambient_state([x]).packed.numel()
    result.sum().backward()


def test_a_graph_is_used_twice_only_if_it_is_retained(namespace):
    op = derived(f"{namespace}::f", sine)
    x = leaf_of(0.5)
    y = op(x)
    y.backward(retain_graph=True)
    y.backward()
    assert_close(x.grad, 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_only_the_gradients_that_are_needed(namespace):
    op = derived(f"{namespace}::f", lambda x, y: x * y, schema="(Tensor x, Tensor y)->Tensor")
    x, y = torch.ones(2), torch.ones(2, requires_grad=True)
    op(x, y).sum().backward()
    assert x.grad is None
    assert_close(y.grad, torch.ones(2))
    with torch.no_grad():
        assert not op(x, y).requires_grad
    assert not op(x, y.detach()).requires_grad


def test_an_input_that_no_output_depends_on_has_zeros(namespace):
    def choose(x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 100:
            return torch.ones(2, dtype=x.dtype)
        return x.exp() if x.sum() > 0 else y.exp()

    op = derived(f"{namespace}::f", choose)
    for x in (leaf_of(1.0, 2.0), leaf_of(-1.0, -2.0), leaf_of(100.0, 100.0)):
        y = leaf_of(3.0, 4.0)
        result = op(x, y)
        # Some branches of the body return a constant. The result must require a gradient anyway.
        assert result.requires_grad
        result.sum().backward()
        assert_close(x.grad, x.detach().exp() if 0 < x.sum() < 100 else torch.zeros_like(x))
        assert_close(y.grad, y.detach().exp() if x.sum() < 0 else torch.zeros_like(y))


def test_subclasses_and_conjugate_views(namespace):
    op = derived(f"{namespace}::f", lambda x: (x * x).abs(), schema="(Tensor x)->Tensor")
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    (gradient,) = torch.autograd.grad(op(z.conj()).sum(), z)
    assert_close(gradient, torch.autograd.grad((z.conj() * z.conj()).abs().sum(), z)[0])

    x = TwoTensor(torch.rand(3), torch.rand(3)).requires_grad_()
    op(x).sum().backward()
    assert_close(x.grad.a, 2 * x.a)


def test_names_of_arguments_and_overloads_do_not_matter(namespace):
    @torchop.custom_op(f"{namespace}::f.over", mutates_args=())
    def op(
        grad_outputs: Tensor,
        needed: Tensor,
        call_number: int,
        state: str = "a, b)",
        *,
        n: int = 2,
    ) -> Tensor:
        return grad_outputs * needed * call_number * n

    op.register_fake(lambda a, b, c, s="", *, n=2: torch.empty_like(a))
    op.derive_autograd()
    a, b = leaf_of(2.0), leaf_of(3.0)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for function in (op, compiled):
        gradients = torch.autograd.grad(function(a, b, 5, n=7).sum(), (a, b))
        assert_close(gradients, (b * 35, a * 35))


def test_the_kernel_of_the_device_is_differentiated(namespace):
    op = torchop.custom_op(f"{namespace}::f", sine, mutates_args=())
    op.register_kernel(TYPE, lambda x: x.sin() * 2)
    op.derive_autograd()
    x = leaf_of(0.5)
    assert_close(torch.autograd.grad(op(x), x)[0], 2 * x.cos())
    with op.set_kernel_enabled(TYPE, enabled=False):
        assert_close(torch.autograd.grad(op(x), x)[0], x.cos())


@pytest.mark.filterwarnings("ignore::torchop.SchemaWarning")
def test_body_gets_the_schemas_defaults(namespace):
    op = derived(f"{namespace}::f", lambda x, n=7: x * n, schema="(Tensor x, int n=3) -> Tensor")
    x = leaf_of(1.0)
    assert torch.autograd.grad(op(x), x)[0].item() == 3
    assert torch.autograd.grad(op(x, 5), x)[0].item() == 5
