"""The vmap rule "sequential" has the same results as a loop over the batch."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev

import torchop
from tests._support.devices import BACKEND

X = torch.arange(12.0).reshape(3, 4)


def define(namespace, **options):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), **options)
    def op(x: Tensor, y: Tensor, n: int = 2) -> Tensor:
        assert x.dim() == 1, "the operator is for vectors"
        return x * y.sum() * n

    op.register_fake(lambda x, y, n: torch.empty_like(x))
    op.register_vmap("sequential")
    return op


# --------------------------------------------------------------------------------------------------
# Registration


def test_sequential_is_registered_on_the_handle_and_by_name(namespace):
    op = define(namespace)
    assert repr(op).endswith("; vmap (sequential)>")
    assert torchop.register_vmap(f"{namespace}::op", "sequential") is None
    assert torchop.register_vmap(op, "sequential") is None


def test_another_word_is_refused(namespace):
    with pytest.raises(
        torchop.RuleSignatureError, match="a vmap rule must be a function or 'sequential', got 'x'"
    ):
        define(namespace).register_vmap("x")


def test_an_operator_that_returns_views_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::view", mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    def view(x):
        return x.view(-1)

    with pytest.raises(RuntimeError, match="returns views, but the vmap rule 'sequential' would"):
        view.register_vmap("sequential")


def test_an_operator_of_another_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, *, Tensor y) -> Tensor")
        library.impl("op", lambda x, *, y: x * y.sum(), BACKEND)
        op = torch.ops.__getattr__(namespace).op
        torchop.register_vmap(op, "sequential", lib=library)
        torchop.register_fake(op, like="x", lib=library)

        def mapped(x, y):
            return torch.vmap(lambda x, y: op(x, y=y), (0, 1))(x, y)

        expected = X * X.sum(1, keepdim=True)
        assert torch.equal(mapped(X, X.t()), expected)
        torch._dynamo.reset()
        compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(X, X.t()), expected)


# --------------------------------------------------------------------------------------------------
# Inputs and outputs


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (-1, 1), (1, None)])
def test_inputs_are_mapped_over_anywhere_or_not_at_all(namespace, in_dims):
    op = define(namespace)
    x = torch.randn(4, 4) if in_dims[0] is not None else torch.randn(4)
    y = torch.randn(4, 4) if in_dims[1] is not None else torch.randn(4)
    expected = torch.vmap(lambda x, y: x * y.sum() * 3, in_dims)(x, y)
    torch.testing.assert_close(torch.vmap(op, (*in_dims, None))(x, y, 3), expected)


def test_lists_optional_tensors_and_several_outputs(namespace):
    @torchop.custom_op(
        f"{namespace}::op",
        mutates_args=(),
        schema="(Tensor?[] xs, Tensor? bias) -> (Tensor[], Tensor, Tensor, int)",
    )
    def op(xs, bias):
        total = sum(x.sum() for x in xs if x is not None)
        tensors = [2 * x for x in xs if x is not None]
        return tensors, total, None if bias is None else bias + total, len(tensors)

    op.register_vmap("sequential")
    doubled, total = torch.vmap(lambda x: op([x, None, X[0]], None)[:2])(X)
    assert torch.equal(doubled[0], 2 * X)
    assert torch.equal(doubled[1], (2 * X[0]).expand(3, 4))
    assert torch.equal(total, X.sum(1) + X[0].sum())
    seen = []
    shifted = torch.vmap(lambda x, b: seen.append(op([x], b)) or seen[-1][2])(X, torch.ones(3))
    assert torch.equal(shifted, X.sum(1) + 1)
    assert seen[0][3] == 1
    torch.vmap(lambda x: seen.append(op([x], None)) or x)(X)
    assert seen[1][2] is None


def test_results_that_do_not_fit_together_are_refused(namespace):
    @torchop.custom_op(f"{namespace}::shape", mutates_args=())
    def shape(x: Tensor) -> Tensor:
        return x[: int(x[0])].clone()

    @torchop.custom_op(f"{namespace}::number", mutates_args=())
    def number(x: Tensor) -> int:
        return int(x[0])

    @torchop.custom_op(f"{namespace}::count", mutates_args=())
    def count(x: Tensor) -> list[Tensor]:
        return [x.clone()] * 0 if x[0] else [x.clone()]

    @torchop.custom_op(
        f"{namespace}::some", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor?)"
    )
    def some(x):
        return x.clone(), x.clone() if x[0] else None

    for op, difference in (
        (shape, r"its result has the shape \[0\] for one and \[4\] for another"),
        (number, "its result is 0 for one and 4 for another"),
        (count, "its result has 1 tensors for one and 0 for another"),
        (some, "output 1 is None for some only"),
    ):
        op.register_vmap("sequential")
        with pytest.raises(
            torchop.ResultError, match=f"'sequential' cannot combine .*: {difference}"
        ):
            torch.vmap(lambda x, op=op: (op(x), x)[1])(X)


# --------------------------------------------------------------------------------------------------
# Other transforms and compilers


def test_nested(namespace):
    op = define(namespace)
    x = torch.randn(2, 3, 4)
    y = torch.randn(4, 2)
    expected = torch.vmap(torch.vmap(lambda x, y: x * y.sum() * 2, (0, None)), (0, 1))(x, y)
    result = torch.vmap(torch.vmap(op, (0, None)), (0, 1))(x, y)
    torch.testing.assert_close(result, expected)


def test_gradients_inside_and_outside(namespace):
    op = define(namespace)
    op.register_autograd(
        lambda ctx, g: (
            g * ctx.saved_tensors[1].sum() * 2,
            (g * ctx.saved_tensors[0] * 2).sum().expand(4),
            None,
        ),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
    )

    def reference(x, y):
        return x * y.sum() * 2

    for transform in (
        lambda f: torch.vmap(grad(lambda x, y: f(x, y).sum(), argnums=1)),
        lambda f: grad(lambda x, y: torch.vmap(f)(x, y).square().sum()),
        lambda f: torch.vmap(jacrev(f)),
    ):
        torch.testing.assert_close(transform(op)(X, X + 1), transform(reference)(X, X + 1))
    leaf = X.clone().requires_grad_()
    torch.vmap(op)(leaf, X).sum().backward()
    torch.testing.assert_close(leaf.grad, (X.sum(1, keepdim=True) * 2).expand(3, 4))


# --------------------------------------------------------------------------------------------------
# Dynamic sizes


def define_scaled(namespace):
    @torchop.custom_op(f"{namespace}::scaled", mutates_args=())
    def scaled(xs: list[Tensor], y: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
        return xs[0] * n, xs[-1] + (0 if y is None else y)

    scaled.register_fake(lambda xs, y, n: (torch.empty_like(xs[0]), torch.empty_like(xs[-1])))
    scaled.register_vmap("sequential")
    return scaled


def in_place(add_, x):
    x = x.clone()
    return torch.vmap(add_)(x, x + 1), x


def twice(x):
    """Return an even number of rows, so that chunks of 2 rows have the same size.

    Dynamo 2.11 cannot trace a last chunk that is smaller than the others.
    """
    return torch.cat([x, x])


DYNAMIC = {
    "one input": lambda ops, x: torch.vmap(ops.op, (0, None))(x, x[0]),
    "another in_dim": lambda ops, x: torch.vmap(ops.op, 1, 1)(x.t(), x.t()),
    "a symbolic integer": lambda ops, x: torch.vmap(lambda v: ops.op(v, v, v.shape[0]))(x),
    "lists": lambda ops, x: torch.vmap(lambda v: ops.scaled([v, 2 * v], None, v.shape[0]))(x),
    "nested": lambda ops, x: torch.vmap(torch.vmap(ops.op))(x[None], x[None]),
    "chunks": lambda ops, x: torch.vmap(ops.op, chunk_size=2)(twice(x), twice(x)),
    "in place": lambda ops, x: in_place(ops.add_, x),
    "gradients": lambda ops, x: torch.vmap(grad(lambda v: ops.op(v, v).sum()))(x),
    "gradients outside": lambda ops, x: grad(lambda v: torch.vmap(ops.op)(v, v).sum())(x),
}


@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("case", DYNAMIC)
def test_sequential_rule_compiles_with_dynamic_sizes(namespace, case, dynamic):
    ops = SimpleNamespace(
        op=define(namespace), scaled=define_scaled(namespace), add_=define_inplace(namespace)
    )
    ops.op.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[0].sum(), g, None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: DYNAMIC[case](ops, x), fullgraph=True, backend=counter, dynamic=dynamic
    )
    for n in (20, 21, 22):
        x = torch.arange(3.0 * n).reshape(3, n)
        torch.testing.assert_close(compiled(x), DYNAMIC[case](ops, x))
    assert counter.frame_count == (1 if dynamic else 2)


def test_results_of_other_shapes_are_refused_with_dynamic_sizes(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(xs: list[Tensor]) -> list[Tensor]:
        return [x.clone() for x in xs]

    lengths = iter((1, 2, 3))
    op.register_fake(lambda xs: [x.new_empty(x.shape[0] * next(lengths)) for x in xs])
    op.register_vmap("sequential")
    compiled = torch.compile(
        lambda x: torch.vmap(lambda v: op([v]))(x), fullgraph=True, backend="eager", dynamic=True
    )
    with pytest.raises(Exception, match=r"its result\[0\] has the shape \[s.*\] for one and \[2"):
        compiled(torch.ones(3, 20))


def test_sizes_that_depend_on_data_are_refused_by_compilers(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.nonzero()

    op.register_fake(lambda x: x.new_empty((torchop.get_ctx().new_dynamic_size(), 1), dtype=int))
    op.register_vmap("sequential")
    assert torch.vmap(op)(torch.ones(3, 4)).shape == (3, 4, 1)
    compiled = torch.compile(torch.vmap(op), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="dimension 0 of its result depends on data"):
        compiled(torch.ones(3, 4))


# --------------------------------------------------------------------------------------------------
# Empty batches


def test_the_fake_kernel_provides_the_shapes_of_an_empty_batch(namespace):
    op = define(namespace)
    empty = torch.empty(5, 0, 4, dtype=torch.double)
    assert torch.vmap(op)(empty[0], empty[0]).shape == (0, 4)
    nested = torch.vmap(torch.vmap(op))(empty, empty)
    assert (nested.shape, nested.dtype) == ((5, 0, 4), torch.double)
    compiled = torch.compile(torch.vmap(op), fullgraph=True, backend="aot_eager")
    assert compiled(empty[0], empty[0]).shape == (0, 4)


def test_an_empty_batch_without_a_fake_kernel_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    op.register_vmap("sequential")
    with pytest.raises(torchop.MissingFakeError, match=f"{namespace}::op"):
        torch.vmap(op)(torch.empty(0, 4))


# --------------------------------------------------------------------------------------------------
# Mutation


def define_inplace(namespace):
    @torchop.custom_op(
        f"{namespace}::add_", mutates_args=("x",), schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    )
    def add_(x, y):
        return x.add_(y.sum())

    add_.register_vmap("sequential")
    return add_


def test_slices_of_the_batch_are_written(namespace):
    add_ = define_inplace(namespace)
    x, y = torch.zeros(4, 3), torch.randn(3, 5)
    result = torch.vmap(add_, (1, 0), out_dims=1)(x, y)
    torch.testing.assert_close(x, y.sum(1).expand(4, 3))
    assert torch.equal(result, x)
    x = torch.zeros(2, 3)
    torch.vmap(torch.vmap(add_, (0, None)), (0, None))(x, y)
    torch.testing.assert_close(x, y.sum().expand(2, 3))


def test_mutated_lists_with_results(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("xs",))
    def op(xs: list[Tensor], y: Tensor) -> Tensor:
        for x in xs:
            x.copy_(y)
        return 2 * y

    op.register_vmap("sequential")
    a, b = torch.zeros(3, 4), torch.zeros(4, 3)
    assert torch.equal(torch.vmap(lambda a, b, y: op([a, b], y), (0, 1, 0))(a, b, X), 2 * X)
    assert torch.equal(a, X)
    assert torch.equal(b, X.t())


def test_memory_shared_by_elements_is_not_written(namespace):
    add_ = define_inplace(namespace)
    x = torch.zeros(4)
    with pytest.raises(torchop.MutationError, match="argument 'x' is written, but vmap does not"):
        torch.vmap(add_, (None, 0))(x, X)
    with pytest.raises(torchop.MutationError, match="elements of the batch share memory"):
        torch.vmap(add_)(x.expand(3, 4), X)
    assert not x.any()


def test_mutation_compiles(namespace):
    add_ = define_inplace(namespace)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x, y):
        torch.vmap(add_)(x, y)
        return x + 1

    x = torch.zeros(3)
    torch.testing.assert_close(run(x, X), X.sum(1) + 1)
    torch.testing.assert_close(x, X.sum(1))


# --------------------------------------------------------------------------------------------------
# Random operators


def define_random(namespace):
    @torchop.custom_op(
        f"{namespace}::noise", mutates_args=(), tags=torch.Tag.nondeterministic_seeded
    )
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    noise.register_fake(torch.empty_like)
    noise.register_vmap("sequential")
    return noise


def test_randomness_follows_the_callers_vmap_argument(namespace):
    noise = define_random(namespace)
    zeros = torch.zeros(50)
    with pytest.raises(RuntimeError, match=f"{namespace}::noise was called in vmap, and draws"):
        torch.vmap(noise)(zeros)
    assert torch.vmap(noise, randomness="same")(zeros).unique().numel() == 1
    assert torch.vmap(noise, randomness="different")(zeros).unique().numel() > 40
    # Each call must also draw new numbers if no input of the operator is mapped.
    unmapped = torch.vmap(lambda x: noise(zeros[0]), randomness="different")(zeros)
    assert unmapped.unique().numel() > 40
    unmapped = torch.vmap(lambda x: noise(zeros[0]), randomness="same")(zeros)
    assert unmapped.unique().numel() == 1


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_random_operator_accepts_an_empty_batch(namespace, randomness):
    noise = define_random(namespace)
    assert torch.vmap(noise, randomness=randomness)(torch.zeros(0, 3)).shape == (0, 3)

    @torchop.custom_op(
        f"{namespace}::add_noise_", mutates_args=("x",), tags=torch.Tag.nondeterministic_seeded
    )
    def add_noise_(x: Tensor) -> None:
        x.add_(torch.rand_like(x))

    add_noise_.register_vmap("sequential")
    assert torch.vmap(lambda x: (add_noise_(x), x)[1], randomness=randomness)(
        torch.zeros(0, 3)
    ).shape == (0, 3)


def test_a_rule_that_replaces_sequential_controls_the_randomness(namespace):
    noise = define_random(namespace)
    noise.register_vmap(lambda info, in_dims, x: (noise(x), in_dims[0]))
    assert torch.vmap(noise)(torch.zeros(50)).unique().numel() > 40
    assert torch.vmap(lambda x: noise(torch.zeros(())))(torch.zeros(50)).unique().numel() == 1


@pytest.mark.parametrize("inner", ["same", "different"])
@pytest.mark.parametrize("outer", ["same", "different"])
def test_randomness_of_nested_maps_equals_pytorchs_operators(namespace, outer, inner):
    def distinct(function):
        mapped = torch.vmap(torch.vmap(function, randomness=inner), randomness=outer)
        return mapped(torch.zeros(4, 5)).unique().numel()

    assert distinct(define_random(namespace)) == distinct(torch.rand_like)


def test_generator_argument_is_used(namespace):
    @torchop.custom_op(
        f"{namespace}::f",
        mutates_args=(),
        schema="(Tensor x, Generator? generator) -> Tensor",
        tags=torch.Tag.nondeterministic_seeded,
    )
    def noise(x, generator):
        return x + torch.rand((), generator=generator)

    noise.register_vmap("sequential")
    generator = torch.Generator().manual_seed(0)
    same = torch.vmap(lambda x: noise(x, generator), randomness="same")(torch.zeros(3))
    assert same.unique().numel() == 1
    expected = torch.Generator().manual_seed(0)
    torch.rand((), generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


def test_numbers_that_a_compiler_cannot_replay_are_refused(namespace):
    noise = define_random(namespace)
    different = torch.compile(torch.vmap(noise, randomness="different"), backend="aot_eager")
    assert different(torch.zeros(50)).unique().numel() > 40
    same = torch.compile(torch.vmap(noise, randomness="same"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="draw the numbers outside and pass them"):
        same(torch.zeros(3))
