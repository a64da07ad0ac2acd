"""Derived formulas: strategies, random numbers, transforms, and bodies that leave autograd."""

import functools
import gc

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torchop
from tests.rules.support import leaf_of
from tests.support import counting, needs_native
from torchop import DerivedFormulaError

each_strategy = pytest.mark.parametrize("strategy", ["recompute", "save"])


def derived(name, body, strategy="recompute", **options):
    op = torchop.custom_op(name, body, mutates_args=(), **options)
    op.derive_autograd(strategy)
    return op


def sine(x: Tensor) -> Tensor:
    return x.sin()


def dropout(x: Tensor, p: float = 0.5) -> Tensor:
    return torch.nn.functional.dropout(x * 2, p)


one_tensor = {"schema": "(Tensor x) -> Tensor"}


# --------------------------------------------------------------------------------------------------
# Registration


def test_the_handle_says_that_its_formula_is_derived(namespace):
    op = derived(f"{namespace}::f", sine)
    assert "autograd derived (recompute)" in repr(op)
    op.derive_autograd("save")
    assert "autograd derived (save)" in repr(op)


def test_deriving_again_and_registering_a_formula_replace_each_other(namespace):
    op = derived(f"{namespace}::f", sine)
    x = leaf_of(0.5)
    op.register_autograd(lambda ctx, grad: 7 * grad)
    assert torch.autograd.grad(op(x), x)[0].item() == 7
    op.derive_autograd("save")
    assert_close(torch.autograd.grad(op(x), x)[0], x.cos())
    op.derive_autograd()
    assert_close(torch.autograd.grad(op(x), x)[0], x.cos())


def test_a_call_between_registrations_keeps_its_own_formula(namespace):
    op = derived(f"{namespace}::f", sine, "save")
    x = leaf_of(0.5)
    saved = op(x)
    op.derive_autograd("recompute")
    recomputed = op(x)
    assert_close(torch.autograd.grad(saved, x), torch.autograd.grad(recomputed, x))


def test_a_call_with_another_formula_is_not_differentiated_by_a_derived_one(namespace):
    op = torchop.custom_op(f"{namespace}::f", sine, mutates_args=())
    op.register_autograd(lambda ctx, grad: grad)
    y = op(leaf_of(0.5))
    op.derive_autograd()
    with pytest.raises(DerivedFormulaError, match=f"{namespace}::f: this call was made when"):
        y.backward()


def test_recomputation_outlives_a_change_of_the_strategy(namespace):
    op = derived(f"{namespace}::f", sine)
    x = leaf_of(0.5)
    y = op(x)
    op.derive_autograd("save")
    assert_close(torch.autograd.grad(y, x)[0], x.cos())


@each_strategy
def test_tensors_without_data_have_gradients_without_data(namespace, strategy):
    op = derived(
        f"{namespace}::f", lambda x: x.sin() if x.mean() > 0 else x, strategy, **one_tensor
    )
    op.register_fake(like="x")
    x = torch.empty(2, 3, device="meta", requires_grad=True)
    op(x).sum().backward()
    assert (x.grad.shape, x.grad.device.type) == (x.shape, "meta")


def test_an_unknown_strategy_is_refused(namespace):
    op = torchop.custom_op(f"{namespace}::f", sine, mutates_args=())
    with pytest.raises(ValueError, match=r'expects strategy="recompute" or "save", got \'cache\''):
        op.derive_autograd("cache")


def test_an_operator_that_mutates_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args={"x"})
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y).clone()

    with pytest.raises(DerivedFormulaError, match=r"it mutates x, and its body cannot run again"):
        f.derive_autograd()
    assert "derived" not in repr(f)


def test_a_form_of_a_family_is_refused_and_goes_through_the_functional_operator(namespace):
    op = derived(f"{namespace}::f", sine)
    in_place = op.derive_inplace()
    with pytest.raises(DerivedFormulaError, match=r"Derive the formula of the functional operator"):
        in_place.derive_autograd()
    with pytest.raises(DerivedFormulaError, match=r"forms with out= have no gradients"):
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
        with pytest.raises(DerivedFormulaError, match=match):
            op.derive_autograd()

    op = torchop.custom_op(f"{namespace}::c", sine, mutates_args=(), effects="ordered")
    with pytest.raises(DerivedFormulaError, match="it has an effect, which would happen again"):
        op.derive_autograd()

    op = derived(f"{namespace}::e", sine)
    op.register_effect("ordered")
    with pytest.raises(DerivedFormulaError, match="has an effect by now"):
        op(leaf_of(0.5))

    view = torchop.custom_op(
        f"{namespace}::d", lambda x: x.view(-1), mutates_args=(), schema="(Tensor(a) x)->Tensor(a)"
    )
    with pytest.raises(DerivedFormulaError, match="it returns views"):
        view.derive_autograd()


def test_a_name_that_is_taken_is_not_replaced(namespace):
    users_op = torchop.custom_op(f"{namespace}::f__backward", sine, mutates_args=())
    op = torchop.custom_op(f"{namespace}::f", sine, mutates_args=())
    with pytest.raises(DerivedFormulaError, match=rf"needs an operator {namespace}::f__backward"):
        op.derive_autograd()
    assert_close(users_op(torch.ones(1)), torch.ones(1).sin())
    with pytest.raises(AttributeError):
        getattr(torch.ops, namespace).f__training  # noqa: B018  # looked up for the error
    assert "derived" not in repr(op)


def test_the_companions_end_with_the_operator(namespace):
    derived(f"{namespace}::f", sine)
    held = getattr(torch.ops, namespace).f__backward.default
    x = torch.ones(1)
    assert_close(held([x], None, [True], x), [x.cos()])

    with pytest.warns(torchop.RedefinitionWarning):
        torchop.custom_op(
            f"{namespace}::f", lambda x: x, schema="(Tensor x)->Tensor", mutates_args=()
        )
    with pytest.raises(torchop.OperatorGoneError, match=r"belongs to .*f, which is gone"):
        held([x], None, [True], x)
    assert not hasattr(getattr(torch.ops, namespace), "f__training")


# --------------------------------------------------------------------------------------------------
# What is saved, and how often a graph can be used


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


def test_recompute_saves_the_inputs_and_save_the_graph(namespace):
    x = torch.ones(1000, requires_grad=True)
    recompute, result = saved_bytes(derived(f"{namespace}::r", chain), x)
    save, _ = saved_bytes(derived(f"{namespace}::s", chain, "save"), x)
    assert recompute == 4000
    assert save == 5 * 4000
    result.sum().backward()


@each_strategy
def test_a_graph_is_used_twice_only_if_it_is_retained(namespace, strategy):
    op = derived(f"{namespace}::f", sine, strategy)
    x = leaf_of(0.5)
    y = op(x)
    y.backward(retain_graph=True)
    y.backward()
    assert_close(x.grad, 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@each_strategy
def test_an_operator_used_twice_in_a_graph(namespace, strategy):
    op = derived(
        f"{namespace}::f", lambda x, y: x * y, strategy, schema="(Tensor x, Tensor y)->Tensor"
    )
    x = leaf_of(2.0)
    op(op(x, x), x).backward()  # one input depends on the other
    assert_close(x.grad, 3 * x.detach() ** 2)


@each_strategy
def test_only_the_gradients_that_are_needed(namespace, strategy):
    op = derived(
        f"{namespace}::f", lambda x, y: x * y, strategy, schema="(Tensor x, Tensor y)->Tensor"
    )
    x, y = torch.ones(2), torch.ones(2, requires_grad=True)
    op(x, y).sum().backward()
    assert x.grad is None
    assert_close(y.grad, torch.ones(2))
    with torch.no_grad():
        assert not op(x, y).requires_grad
    assert not op(x, y.detach()).requires_grad


@each_strategy
def test_an_input_that_no_output_depends_on_has_zeros(namespace, strategy):
    def choose(x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 100:
            return torch.ones(2, dtype=x.dtype)
        return x.exp() if x.sum() > 0 else y.exp()

    op = derived(f"{namespace}::f", choose, strategy)
    for x in (leaf_of(1.0, 2.0), leaf_of(-1.0, -2.0), leaf_of(100.0, 100.0)):
        y = leaf_of(3.0, 4.0)
        result = op(x, y)
        assert result.requires_grad  # whatever the data say
        result.sum().backward()
        assert_close(x.grad, x.detach().exp() if 0 < x.sum() < 100 else torch.zeros_like(x))
        assert_close(y.grad, y.detach().exp() if x.sum() < 0 else torch.zeros_like(y))


@each_strategy
def test_a_saved_input_that_was_written_is_noticed(namespace, strategy):
    op = derived(f"{namespace}::f", sine, strategy)
    x = leaf_of(1.0) * 1
    y = op(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@needs_native
@each_strategy
def test_calls_are_native(namespace, strategy):
    op = derived(f"{namespace}::f", sine, strategy)
    x = leaf_of(0.5)
    op(x).backward()
    with counting(op) as calls, torch.no_grad():
        op(x)
    assert calls == {"native": 1}
    with counting(op) as calls:
        op(x)
    assert calls == {"native": 1}


@each_strategy
def test_subclasses_and_conjugate_views(namespace, strategy):
    op = derived(f"{namespace}::f", lambda x: (x * x).abs(), strategy, schema="(Tensor x)->Tensor")
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
        surroundings: str = "a, b)",
        *,
        n: int = 2,
    ) -> Tensor:
        return grad_outputs * needed * call_number * n

    op.register_fake(lambda a, b, c, s="", *, n=2: torch.empty_like(a))
    op.derive_autograd()
    a, b = leaf_of(2.0), leaf_of(3.0)
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for function in (op, compiled):
        gradients = torch.autograd.grad(function(a, b, 5, n=7).sum(), (a, b))
        assert_close(gradients, (b * 35, a * 35))


def test_the_operator_ends_with_its_library(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    derived(f"{namespace}::f", sine, lib=library)
    held = getattr(torch.ops, namespace).f__backward.default
    library._destroy()
    with pytest.raises(torchop.OperatorGoneError, match=r"belongs to .*f, which is gone"):
        held([leaf_of(1.0)], None, [True], leaf_of(1.0))


def test_the_kernel_of_the_device_is_differentiated(namespace):
    op = torchop.custom_op(f"{namespace}::f", sine, mutates_args=())
    op.register_kernel("cpu", lambda x: x.sin() * 2)
    op.derive_autograd()
    x = leaf_of(0.5)
    assert_close(torch.autograd.grad(op(x), x)[0], 2 * x.cos())
    with op.set_kernel_enabled("cpu", enabled=False):
        assert_close(torch.autograd.grad(op(x), x)[0], x.cos())
    op.derive_autograd("save")
    assert_close(torch.autograd.grad(op(x), x)[0], 2 * x.cos())


@pytest.mark.filterwarnings("ignore::torchop.SchemaWarning")
def test_defaults_are_those_of_the_schema(namespace):
    op = derived(f"{namespace}::f", lambda x, n=7: x * n, schema="(Tensor x, int n=3) -> Tensor")
    x = leaf_of(1.0)
    assert torch.autograd.grad(op(x), x)[0].item() == 3
    assert torch.autograd.grad(op(x, 5), x)[0].item() == 5


@each_strategy
def test_no_memory_is_kept(namespace, strategy):
    op = derived(f"{namespace}::f", sine, strategy)
    x = leaf_of(0.5)
    op(x).backward()
    gc.collect()
    alive = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    for _ in range(20):
        op(x).backward()
        op(x)
    assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) == alive


# --------------------------------------------------------------------------------------------------
# Random numbers and autocast


@each_strategy
def test_random_numbers_are_those_of_the_forward_and_the_stream_goes_on(namespace, strategy):
    op = derived(f"{namespace}::f", dropout, strategy)

    def train(function):
        torch.manual_seed(5)
        x = torch.ones(100, requires_grad=True)
        first, second = function(x), function(x, 0.2)
        between = torch.rand(1)
        (first.exp() + second).sum().backward()
        return first.detach(), x.grad, between, torch.rand(3)

    for ours, plain in zip(train(op), train(dropout), strict=True):
        assert torch.equal(ours, plain)


@each_strategy
def test_a_generator_among_the_arguments_is_replayed(namespace, strategy):
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.rand(x.shape, generator=generator)

    op = derived(f"{namespace}::f", noisy, strategy)
    x = torch.ones(4, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    y = op(x, generator)
    state = generator.get_state()
    y.sum().backward()
    assert_close(x.grad, y.detach())
    assert torch.equal(generator.get_state(), state)


@each_strategy
def test_a_batch_of_gradients_shares_the_random_numbers_of_the_forward(namespace, strategy):
    op = derived(f"{namespace}::f", dropout, strategy)
    x = torch.ones(5, requires_grad=True)
    y = op(x)
    (jacobian,) = torch.autograd.grad(y, x, torch.eye(5), is_grads_batched=True)
    assert torch.equal(jacobian, y.detach().diag())


def test_random_numbers_are_replayed_by_a_checkpoint_too(namespace):
    op = derived(f"{namespace}::f", dropout)

    def train(function):
        torch.manual_seed(5)
        x = torch.ones(100, requires_grad=True)
        y = checkpoint(lambda x: function(x).sin() * function(x), x, use_reentrant=False)
        y.sum().backward()
        return x.grad

    assert torch.equal(train(op), train(dropout))


@each_strategy
def test_selective_checkpointing_may_save_the_operator(namespace, strategy):
    op = derived(f"{namespace}::f", dropout, strategy)
    contexts = functools.partial(create_selective_checkpoint_contexts, [op.overload])
    x = torch.ones(100, requires_grad=True)

    def train(function):
        torch.manual_seed(5)
        y = checkpoint(lambda x: function(x).sin(), x, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(train(op), train(dropout))


@each_strategy
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:Detected that context_fn")
def test_what_a_checkpoint_saved_knows_its_random_numbers(namespace, strategy, compiled):
    calls = []

    def body(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.nn.functional.dropout(x, 0.5)

    op = derived(f"{namespace}::f", body, strategy, tags=torch.Tag.nondeterministic_seeded)
    op.register_fake(like="x")
    x = torch.rand(100, requires_grad=True)

    def region(x):
        return op(op(x).sin() + 1).sin()

    def train(function):
        torch.manual_seed(5)
        y = function(x).sum()
        calls.clear()
        return torch.autograd.grad(y, x)[0]

    def calls_of_training(saved):
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)

        def function(x):
            return checkpoint(region, x, use_reentrant=False, context_fn=contexts)

        if compiled:
            torch._dynamo.reset()
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert torch.equal(train(function), train(region))
        train(function)
        return len(calls)

    # For the gradients of two calls; nothing else runs again, unless it is not saved.
    assert calls_of_training([op.overload]) == 2
    assert calls_of_training([]) == 4
    op.register_checkpoint_policy("save")
    assert calls_of_training([]) == 2


@each_strategy
def test_autocast_is_that_of_the_forward(namespace, strategy):
    dtypes = []

    def product(x: Tensor, y: Tensor) -> Tensor:
        result = x @ y
        dtypes.append(result.dtype)
        return result

    op = derived(f"{namespace}::f", product, strategy)
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        z = op(x, y)
    (grad,) = torch.autograd.grad(z.float().sum(), x)
    assert set(dtypes) == {torch.bfloat16}

    with torch.autocast("cpu", torch.bfloat16):
        expected = x @ y
    assert torch.equal(grad, torch.autograd.grad(expected.float().sum(), x)[0])

    dtypes.clear()
    z = op(x, y)
    with torch.autocast("cpu", torch.bfloat16):  # a backward in there changes nothing
        z.sum().backward()
    assert set(dtypes) == {torch.float32}


# --------------------------------------------------------------------------------------------------
# Transforms


@each_strategy
def test_torch_func_differentiates_through_the_body(namespace, strategy):
    op = derived(
        f"{namespace}::f",
        lambda x: x**3 if x.sum() > 0 else -x,
        strategy,
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


@each_strategy
def test_arguments_left_out_are_no_part_of_a_batch(namespace, strategy):
    def body(x: Tensor, scale: float = 2.0) -> Tensor:
        return x.sin() * scale

    op = derived(f"{namespace}::f", body, strategy)
    op.register_vmap("sequential")
    xs = torch.rand(3, 2, dtype=torch.float64)
    for arguments in ((), (3.0,)):
        grads = torch.vmap(torch.func.grad(lambda x, a=arguments: op(x, *a).sum()))(xs)
        assert_close(grads, xs.cos() * (arguments or (2.0,))[0])


@each_strategy
def test_a_batch_without_elements_has_gradients_without_elements(namespace, strategy):
    op = derived(
        f"{namespace}::f", lambda x, w: x * w, strategy, schema="(Tensor x, Tensor w) -> Tensor"
    )
    op.register_fake(lambda x, w: torch.empty_like(x))
    op.register_vmap("sequential")
    of_one = torch.func.grad(lambda x, w: op(x, w).sum(), argnums=(0, 1))
    for size in (0, 3):
        grads = torch.vmap(of_one, in_dims=(0, None))(torch.rand(size, 2), torch.rand(2))
        assert [grad.shape for grad in grads] == [(size, 2), (size, 2)]


@each_strategy
def test_forward_mode_goes_over_the_derived_backward(namespace, strategy):
    op = derived(f"{namespace}::f", lambda x: x**3, strategy, schema="(Tensor x) -> Tensor")
    op.register_jvp(
        lambda ctx, tangent: 3 * ctx.saved_tensors[0] ** 2 * tangent,
        setup_context=lambda ctx, inputs, output: ctx.save_for_forward(*inputs),
    )
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert_close(torch.func.hessian(lambda x: op(x).sum())(x), torch.diag(6 * x))
    assert torch.autograd.gradgradcheck(op, x.requires_grad_(), check_fwd_over_rev=True)


@each_strategy
@pytest.mark.parametrize("has_rule", [True, False])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_element_of_a_batch(namespace, strategy, has_rule):
    def body(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (x * weight).sin() if x.sum() > 0 else x * weight.exp(), x.detach() * 2

    op = derived(f"{namespace}::f", body, strategy)

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

    weight.requires_grad_()  # and once more, around it
    ours = torch.autograd.grad(both(lambda x, w: op(x, w)[0])[0].sum(), weight)
    assert_close(ours, torch.autograd.grad(both(branches)[0].sum(), weight))


# --------------------------------------------------------------------------------------------------
# Bodies that leave autograd

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


def test_what_stands_for_a_backward_in_a_class():
    assert torchop.derived.strategy == "recompute"
    assert torchop.derived("save").strategy == "save"
    assert repr(torchop.derived("save")) == "torchop.derived('save')"
    with pytest.raises(ValueError, match=r'expects "recompute" or "save", got \'cache\''):
        torchop.derived("cache")
