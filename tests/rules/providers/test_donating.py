"""Kernels that may write their results over arguments: who gets copies, and who does not."""

import functools

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchop
from tests.devices import TYPE
from tests.support import in_threads


def define(namespace, *, supports=None, order=("over",), **options):
    """`ns::op`, of which the provider `over` writes `x * w` over `x`; and where `x` was."""

    @torchop.custom_op(f"{namespace}::op", mutates_args=(), priority=order, **options)
    def op(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    places = []

    def over(x, w):
        places.append(x.data_ptr())
        return x.mul_(w)

    op.register_fake(lambda x, w: torch.empty_like(x))
    op.register_kernel(TYPE, over, provider="over", donates=("x",), supports=supports)
    return op, places


def writing(namespace, name="op"):
    return getattr(getattr(torch.ops, namespace), f"{name}__donating")


def test_a_call_leaves_its_arguments_alone(namespace):
    op, places = define(namespace)
    x, w = torch.full((3,), 2.0), torch.full((3,), 5.0)
    for call in (op, getattr(torch.ops, namespace).op):
        assert call(x, w).tolist() == [10.0] * 3
        assert x.tolist() == [2.0] * 3
    with torchop.native.disabled():
        assert op(x, w).tolist() == [10.0] * 3
    assert x.tolist() == [2.0] * 3
    assert len(places) == 3
    assert x.data_ptr() not in places


def test_the_forms_that_write_save_the_copy(namespace):
    op, places = define(namespace)
    inplace = op.derive_inplace()
    w = torch.full((3,), 5.0)
    for call, returned in ((inplace, True), (writing(namespace), False)):
        x = torch.full((3,), 2.0)
        version = x._version
        result = call(x, w)
        assert (result is x) is returned
        assert x.tolist() == [10.0] * 3
        assert places.pop() == x.data_ptr()
        assert x._version > version
    assert places == []
    with torchop.priority({op: ["reference"]}):
        inplace(x, w)
        writing(namespace)(x, w)
    assert x.tolist() == [250.0] * 3
    assert places == []


@pytest.mark.filterwarnings("ignore::torchop.ProviderWarning")
def test_a_form_whose_call_another_kernel_takes(namespace):
    """Also after calls that it takes, of the same operator."""
    op, places = define(namespace, supports=lambda x, w: x.shape == w.shape)
    inplace = op.derive_inplace()
    for _ in range(2):
        x = torch.full((3,), 2.0)
        inplace(x, torch.tensor(5.0))
        assert x.tolist() == [10.0] * 3
        assert places == []
        inplace(x, torch.full((3,), 5.0))
        assert x.tolist() == [50.0] * 3
        assert places.pop() == x.data_ptr()


def test_arguments_that_share_memory_are_copied(namespace):
    """The kernel reads the one while it writes over the other."""
    op, places = define(namespace)
    inplace = op.derive_inplace()
    x = torch.arange(4.0)
    inplace(x, x)
    assert x.tolist() == [0.0, 1.0, 4.0, 9.0]
    assert places.pop() != x.data_ptr()
    both = torch.arange(6.0)
    writing(namespace)(both[:4], both[2:])
    assert both.tolist() == [0.0, 3.0, 8.0, 15.0, 4.0, 5.0]
    assert places.pop() != both.data_ptr()


def test_views_and_other_layouts(namespace):
    op, _ = define(namespace)
    inplace = op.derive_inplace()
    whole = torch.ones(4, 6)
    for view in (whole[:, ::2], whole.mT, whole[1]):
        w = torch.full(view.shape, 3.0)
        expected = whole.clone()
        expected.as_strided(view.shape, view.stride(), view.storage_offset()).mul_(3)
        assert torch.equal(op(view, w), view * w)
        inplace(view, w)
        assert torch.equal(whole, expected)
    number = torch.tensor([1 + 2j])
    inplace(number.conj(), torch.tensor([2 + 0j]))
    assert number.tolist() == [2 + 4j]
    with pytest.raises(RuntimeError, match="memory"):
        writing(namespace)(torch.ones(1).expand(3), torch.ones(3))


def test_tensors_without_a_pointer(namespace):
    op, _ = define(namespace)
    op.register_kernel(TYPE, lambda x, w: x.mul_(w), provider="over", donates=("x",))
    sparse = torch.eye(2).to_sparse()
    assert op(sparse, torch.full((2, 2), 5.0)).to_dense().tolist() == [[5, 0], [0, 5]]
    writing(namespace)(sparse, torch.full((2, 2), 3.0))
    assert sparse.to_dense().tolist() == [[3, 0], [0, 3]]


def test_several_results(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), priority=["over"])
    def op(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x + residual
        return total * w, total, total.sum()

    op.register_fake(lambda x, r, w: (torch.empty_like(x), torch.empty_like(x), x.new_empty(())))
    places = []

    @op.register_kernel(TYPE, provider="over", donates=["x", "residual"])
    def _(x, residual, w):
        places[:] = x.data_ptr(), residual.data_ptr()
        residual.add_(x)
        return torch.mul(residual, w, out=x), residual, residual.sum()

    x, residual, w = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 5.0)
    first, second, total = op(x, residual, w)
    assert (first.tolist(), second.tolist(), total.item()) == ([15, 15], [3, 3], 6)
    assert (x.tolist(), residual.tolist()) == ([1, 1], [2, 2])
    total = writing(namespace)(x, residual, w)
    assert (x.tolist(), residual.tolist(), total.item()) == ([15, 15], [3, 3], 6)
    assert places == [x.data_ptr(), residual.data_ptr()]
    torch.library.opcheck(writing(namespace).default, (x, residual, w))


def test_a_kernel_may_call_the_operator(namespace):
    """The inner call gets copies, whatever the outer one may write over."""
    op, _ = define(namespace)
    inplace = op.derive_inplace()

    depth, inside = [], []

    def nested(x, w):
        if not depth:
            depth.append(1)
            inside.append(op(x, w))  # comes here again
        return x.mul_(w)

    op.register_kernel(TYPE, nested, provider="over", donates=("x",))
    x = torch.full((2,), 3.0)
    inplace(x, torch.full((2,), 2.0))
    assert x.tolist() == inside[0].tolist() == [6.0] * 2


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (lambda x, w: w, "is input 'w' itself"),
        (lambda x, w: w.view(-1), "shares memory with input 'w'"),
    ],
)
def test_a_result_that_is_another_argument(namespace, kernel, words):
    op, _ = define(namespace)
    op.register_kernel(TYPE, kernel, provider="over", donates=("x",))
    inplace = op.derive_inplace()
    x, w = torch.ones(2), torch.ones(2)
    for call in (op, inplace, writing(namespace)):
        with pytest.raises(torchop.AliasError, match=words):
            call(x, w)


def test_another_view_of_the_argument_as_the_result(namespace):
    op, _ = define(namespace)
    op.register_kernel(TYPE, lambda x, w: x.mul_(w).mT, provider="over", donates=("x",))
    inplace = op.derive_inplace()
    x = torch.arange(4.0).view(2, 2)
    inplace(x, torch.ones(2, 2))
    assert x.tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_a_result_that_does_not_fit(namespace):
    op, _ = define(namespace)
    op.register_kernel(TYPE, lambda x, w: x * w, provider="over", donates=("x",))
    x, w = torch.ones(2), torch.ones(3, 2)
    with pytest.raises(
        torchop.ResultError,
        match=rf"{namespace}::op: a result of shape \[3, 2\] .* cannot be written over 'x', which "
        rf"has \[2\] .* Call {namespace}::op instead",
    ):
        writing(namespace)(x, w)
    assert x.tolist() == [1, 1]
    assert op(x, w).shape == (3, 2)


@pytest.mark.parametrize(
    ("donates", "error", "words"),
    [
        ("x", TypeError, "donates expects a list of names"),
        (3, TypeError, "donates expects a list of names"),
        (["n"], ValueError, "donates names 'n', but .* could be written over: x, w"),
        ([3], ValueError, "donates names 3, but"),
        (["y"], ValueError, "donates names 'y', but"),
        (["x", "w"], ValueError, "donates names 2 arguments for 1 results"),
        (["x", "x"], ValueError, "donates names 2 arguments for 1 results"),
        (["w"], ValueError, r"donates is \('w',\), but it is \('x',\) for another provider"),
    ],
)
def test_what_is_said_of_donates_is_checked(namespace, donates, error, words):
    op, _ = define(namespace)
    with pytest.raises(error, match=rf"^{namespace}::op: the provider 'other': {words}"):
        op.register_kernel(TYPE, lambda x, w: x, provider="other", donates=donates)
    assert [kernel.provider for kernel in torchop.providers(op.name)] == ["reference", "over"]
    with pytest.raises(TypeError, match="donates only for the kernel of a provider"):
        op.register_kernel(TYPE, lambda x, w: x, donates=["x"])


def test_operators_that_cannot_donate(namespace):
    writes = torchop.custom_op(
        f"{namespace}::writes",
        lambda x: None,
        mutates_args=("x",),
        schema="(Tensor(a!) x) -> ()",
    )
    with pytest.raises(ValueError, match="an operator that mutates nothing and returns fresh"):
        writes.register_kernel(TYPE, lambda x: None, provider="over", donates=["x"])
    with torchop.Library(namespace, "FRAGMENT") as library:
        torch.library.define(f"{namespace}::foreign", "(Tensor x) -> Tensor", lib=library)
        with pytest.raises(NotImplementedError, match="another package defined this one"):
            torchop.register_kernel(
                f"{namespace}::foreign",
                TYPE,
                lambda x: x,
                provider="over",
                donates=["x"],
                lib=library,
            )


def test_gradients_need_what_would_be_overwritten(namespace):
    op, places = define(namespace)
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    inplace = op.derive_inplace()
    leaf = torch.full((2,), 3.0, requires_grad=True)
    w = torch.full((2,), 5.0, requires_grad=True)
    op(leaf, w).sum().backward()
    assert (leaf.grad.tolist(), w.grad.tolist()) == ([5, 5], [3, 3])
    x = leaf * 1
    leaf.grad = w.grad = None
    inplace(x, w).sum().backward()
    assert (leaf.grad.tolist(), w.grad.tolist()) == ([5, 5], [3, 3])
    assert len(places) == 2
    with pytest.raises(RuntimeError):
        writing(namespace)(leaf * 1, w).sum().backward()


def test_vmap_autocast_and_deterministic_orders_hold(namespace):
    op, _ = define(namespace)
    op.register_vmap("sequential")
    x, w = torch.full((2, 3), 2.0), torch.full((2, 3), 5.0)
    assert torch.equal(torch.vmap(op)(x, w), x * w)
    assert torch.equal(x, torch.full((2, 3), 2.0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_leaves_out_copies_that_nobody_needs(namespace, dynamic):
    op, places = define(namespace)
    made = []

    @torchop.custom_op(f"{namespace}::make", mutates_args=())
    def make(x: Tensor) -> Tensor:
        result = x + 1
        made.append(result)  # and keeps its memory, which nothing else gets
        return result

    make.register_fake(torch.empty_like)

    def function(x, w):
        read, other = make(x), make(x)
        # Nobody reads the first one later; the second, an argument and a pair are read.
        return op(make(x), w), op(read, w), read, op(x, w), op(other, other)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for size in (3, 4) if dynamic else (3,):
        x, w = torch.arange(float(size)), torch.full((size,), 5.0)
        results, expected = compiled(x, w), function(x, w)
        made.clear()
        places.clear()
        results = compiled(x, w)
        assert len(places) == 4  # each call is made once
        assert len(set(places) & {tensor.data_ptr() for tensor in made}) == 1
        assert x.data_ptr() not in places
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one, other)
        with torchop.priority({op: ["reference"]}):
            assert torch.equal(compiled(x, w)[0], expected[0])


@pytest.mark.parametrize("must_save", [True, False])
@pytest.mark.filterwarnings("ignore:.*context_fn is passed.*")
def test_the_policy_of_a_region_names_the_operator(namespace, must_save):
    op, _ = define(f"{namespace}_{must_save}")  # PyTorch's caches of graphs know it by its name
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    graphs = []

    def compiler(lowered, inputs):
        graphs.append("donating" in str(lowered.graph))
        return make_boxed_func(lowered.forward)

    def inductor(graph, inputs):  # by this name, because only its graphs donate
        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
        )(graph, inputs)

    def policy(ctx, called, *args, **kwargs):
        is_saved = must_save and called is op.overload
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def call(x, w):
        return checkpoint(
            lambda x, w: op(x.sin(), w).exp(),
            x,
            w,
            use_reentrant=False,
            context_fn=contexts,
        )

    x, w = torch.arange(3.0).requires_grad_(), torch.full((3,), 0.5)
    torch.compile(call, backend=inductor, fullgraph=True)(x, w).sum().backward()
    expected = torch.autograd.grad((x.sin() * w).exp().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert graphs == [True, not must_save]


def test_other_compilers_call_the_operator(namespace):
    op, _ = define(namespace)
    names = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def compiler(lowered, inputs):
            names.extend(str(node.target) for node in lowered.graph.nodes)
            return lowered.forward

        return aot_autograd(fw_compiler=compiler)(graph, inputs)

    x = torch.ones(3)
    assert torch.compile(lambda x: op(x + 1, x), backend=backend)(x).tolist() == [2.0] * 3
    assert f"{namespace}.op.default" in names
    assert "donating" not in str(names)


def test_an_inlined_kernel_writes_into_copies(namespace):
    op, _ = define(namespace, compile="inline")
    op.register_kernel(TYPE, lambda x, w: x.mul_(w), provider="over", donates=("x",))
    x = torch.full((3,), 2.0)
    compiled = torch.compile(lambda x: (op(x, x), x * 1), backend="aot_eager", fullgraph=True)
    assert [each.tolist() for each in compiled(x)] == [[4.0] * 3, [2.0] * 3]
    assert x.tolist() == [2.0] * 3


def test_the_tag_of_caches_tells_of_the_operator_in_graphs(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, w: x * w,
        mutates_args=(),
        schema="(Tensor x, Tensor w) -> Tensor",
    )
    op.register_fake(lambda x, w: torch.empty_like(x))
    without = torchop.cache_key_tag()
    op.register_kernel(TYPE, lambda x, w: x * w, provider="over")
    assert torchop.cache_key_tag() == without
    op.register_kernel(TYPE, lambda x, w: x.mul_(w), provider="over", donates=["x"])
    assert torchop.cache_key_tag() != without


def test_everything_goes_with_the_operator(namespace):
    define(namespace)
    writing(namespace)(torch.ones(2), torch.ones(2))
    overload = writing(namespace).default
    define(namespace)
    with pytest.raises(torchop.OperatorGoneError, match="op__donating belongs to"):
        overload(torch.ones(2), torch.ones(2))
    x = torch.full((2,), 3.0)
    writing(namespace)(x, x.clone())
    assert x.tolist() == [9.0, 9.0]


def test_a_provider_that_is_gone_leaves_the_form(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, w: x * w,
        mutates_args=(),
        schema="(Tensor x, Tensor w) -> Tensor",
        priority=["over"],
    )
    inplace = op.derive_inplace()
    with torchop.Library(namespace, "FRAGMENT") as library:
        op.register_kernel(
            TYPE, lambda x, w: x.fill_(7), provider="over", donates=["x"], lib=library
        )
        x = torch.ones(2)
        assert inplace(x, x.clone()).tolist() == [7.0, 7.0]
    with pytest.warns(torchop.ProviderWarning, match="was removed"):
        assert inplace(x, torch.ones(2)).tolist() == [7.0, 7.0]
    writing(namespace)(x, torch.full((2,), 2.0))
    assert x.tolist() == [14.0, 14.0]


def test_threads_give_up_arguments_of_their_own(namespace):
    op, _ = define(namespace)
    inplace = op.derive_inplace()

    def work(number):
        for _ in range(200):
            x, w = torch.full((3,), float(number)), torch.full((3,), 2.0)
            assert op(x, w).tolist() == [2.0 * number] * 3
            assert x.tolist() == [number] * 3
            assert inplace(x, w) is x
            assert x.tolist() == [2.0 * number] * 3

    in_threads(work)
