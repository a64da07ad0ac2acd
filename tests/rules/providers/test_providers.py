"""Registration of providers, their `supports` functions, and the rules that all of them share."""

import dataclasses
import functools
import gc
import time

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import assert_clean, needs_native
from tests._support.devices import BACKEND, DEVICE, TYPE, needs_context_in_backward
from tests._support.forking import run_forked
from tests.rules.support import adding_one as define


def adding(amount):
    return lambda x: x + amount


def value(op, *args) -> float:
    return op(*(args or (torch.zeros(1),))).flatten()[0].item()


def scaling(namespace, **options):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), **options)
    def op(x: Tensor, factor: float = 2.0, *, count: int = 1) -> Tensor:
        return x * factor * count

    return op


# --------------------------------------------------------------------------------------------------
# Registration


@pytest.mark.parametrize("library", [torchop, torch.library], ids=["torchop", "torch.library"])
def test_stock_operators_have_no_providers(namespace, library):
    name = f"{namespace}::op"
    with pytest.raises(torchop.OperatorNotFoundError, match=f"^the operator {name} does not exist"):
        torchop.register_kernel(name, TYPE, adding(10), provider="fast")
    lib = library.Library(namespace, "FRAGMENT")
    lib.define("op(Tensor x) -> Tensor")
    lib.impl("op", adding(1), BACKEND)
    message = rf"^register_kernel\({name}\): torchop did not define .* torchop\.get_kernel\.$"
    with pytest.raises(NotImplementedError, match=message):
        torchop.register_kernel(name, TYPE, adding(10), provider="fast")
    assert torchop.providers(name) == []
    assert value(getattr(torch.ops, namespace).op) == 1


@pytest.mark.parametrize("name", ["reference", "", "a b", "a,b", 3, "a::b"])
def test_names_that_a_provider_cannot_have(namespace, name):
    op = define(namespace)
    with pytest.raises(torchop.ProviderError, match=f"{namespace}::op: "):
        op.register_kernel(TYPE, adding(1), provider=name)


def test_options_need_a_provider(namespace):
    op = define(namespace)
    with pytest.raises(TypeError, match="takes supports only for the kernel of a provider"):
        op.register_kernel(TYPE, adding(1), supports=lambda x: True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"supported": 1}, TypeError, "supported expects a bool, or a function"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant expects a bool, got 1"),
        ({"deterministic": None}, TypeError, "deterministic expects a bool, got None"),
        ({"tolerance": {"float32": (0, 0)}}, TypeError, r"a dict of \(rtol, atol\) by dtype"),
        ({"tolerance": {torch.float32: 1e-3}}, TypeError, r"a dict of \(rtol, atol\) by dtype"),
        ({"tolerance": [1e-3]}, TypeError, r"a dict of \(rtol, atol\) by dtype"),
        ({"configs": {"block": 1}}, TypeError, "configs expects a list of dicts"),
        ({"configs": [{"x": 1}]}, ValueError, "'x' is an argument of the operator"),
        ({"configs": [{"a": 1}, {"b": 1}]}, ValueError, "all configs must have the same names"),
        ({"supports": lambda: True}, TypeError, r"supports is called with \(x\)"),
        ({"supports": 1}, TypeError, "supports"),
    ],
)
def test_options_of_a_provider_are_validated(namespace, options, error, words):
    op = define(namespace)
    with pytest.raises(error, match=words):
        op.register_kernel(TYPE, lambda x, **configs: x, provider="fast", **options)
    assert torchop.explain(op, torch.ones(1)).provider is None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda y, factor=2.0, *, count=1: y, "calls the parameter 'x' of the operator 'y'"),
        (lambda factor, x, *, count=1: x, "calls the parameter 'x' of the operator 'factor'"),
        (lambda x, factor=3.0, *, count=1: x, "has the default 3.0 for 'factor', the operator 2.0"),
        (lambda x, factor=2.0, *, count=2: x, "has the default 2 for 'count', the operator 1"),
        (lambda x=None, factor=2.0, *, count=1: x, "has the default None for 'x', the operator n"),
        (lambda x, factor, other, *, count: x, "is called with"),
    ],
)
def test_a_signature_is_compared_with_the_schema(namespace, function, words):
    op = scaling(namespace)
    with pytest.raises(torchop.RuleSignatureError, match=rf"the provider 'fast'.*{words}"):
        op.register_kernel(TYPE, function, provider="fast")


def test_a_kernel_gets_every_argument_and_the_first_config(namespace):
    op = scaling(namespace, priority=["fast"])
    seen = []

    @op.register_kernel(TYPE, provider="fast", configs=[{"block": 64}, {"block": 128}])
    def kernel(x, factor=2.0, *, count=1, block):
        seen.append((factor, count, block))
        return x.clone()

    op(torch.ones(1))
    op(torch.ones(1), 3.0, count=4)
    assert seen == [(2.0, 1, 64), (3.0, 4, 64)]


def test_a_config_that_the_kernel_does_not_take(namespace):
    words = r"configs has 'blocks', which .* does not take by keyword \(did you mean 'block'\?\)"
    with pytest.raises(torchop.RuleSignatureError, match=words):
        define(namespace).register_kernel(
            TYPE, lambda x, block=1: x + block, provider="fast", configs=[{"blocks": 2}]
        )


def test_a_kernel_for_meta_tensors_is_refused(namespace):
    with pytest.raises(ValueError, match="use the fake kernel for all providers"):
        define(namespace).register_kernel([TYPE, "meta"], adding(1), provider="fast")


def test_registering_again_replaces_and_another_module_is_reported(namespace):
    op = define(namespace, priority=["fast"])
    op.register_kernel(TYPE, adding(10), provider="fast")
    op.register_kernel(TYPE, adding(20), provider="fast")  # as if a notebook cell ran again
    assert value(op) == 20
    other = adding(30)
    other.__module__ = "other_package"
    with pytest.warns(
        torchop.RedefinitionWarning, match="'fast' was registered at .*test_providers"
    ):
        op.register_kernel(TYPE, other, provider="fast")
    assert value(op) == 30


@pytest.mark.parametrize("way", ["close", "collect"])
def test_closing_the_library_removes_the_provider(namespace, way):
    op = define(namespace, priority=["fast"])
    library = torchop.Library(namespace, "FRAGMENT")
    torchop.register_kernel(op, TYPE, adding(10), provider="fast", lib=library)
    assert value(op) == 10
    if way == "close":
        library._destroy()
    del library
    gc.collect()
    with pytest.warns(torchop.ProviderWarning, match="'fast' is skipped.* it was removed, with"):
        assert value(op) == 1
    assert (
        "fast: it was removed, with the library" in torchop.explain(op, torch.ones(1)).providers[0]
    )
    closed = torchop.Library(namespace, "FRAGMENT")
    closed._destroy()
    with pytest.raises(torchop.OperatorGoneError, match="has been destroyed"):
        torchop.register_kernel(op, TYPE, adding(10), provider="fast", lib=closed)


# --------------------------------------------------------------------------------------------------
# Arguments of `supports`


@pytest.mark.filterwarnings("ignore::torchop.ProviderWarning")
def test_supports_gets_all_arguments_and_tensors_without_data(namespace):
    op = scaling(namespace, priority=["fast"])
    seen = []

    def supports(x, factor, *, count):
        seen.append((x.shape, x.stride(), x.dtype, x.device, factor, count))
        return x.device == DEVICE and x.is_contiguous()

    op.register_kernel(TYPE, lambda x, factor, *, count: x + 10, provider="fast", supports=supports)
    x = torch.zeros(2, 3)
    assert value(op, x) == 10
    assert value(op, x.clone()) == 10
    assert value(op, x.t()) == 0
    assert value(op, x, 2.5) == 10
    assert value(op, x.double()) == 10
    assert seen == [
        ((2, 3), (3, 1), torch.float32, DEVICE, 2.0, 1),
        ((3, 2), (1, 3), torch.float32, DEVICE, 2.0, 1),
        ((2, 3), (3, 1), torch.float32, DEVICE, 2.5, 1),
        ((2, 3), (3, 1), torch.float64, DEVICE, 2.0, 1),
    ]


@pytest.mark.parametrize(
    ("supports", "read"),
    [
        (lambda x: bool(x.sum() > 0), "the data"),
        (lambda x: x.sum().item() > 0, "the data"),
        (lambda x: x.tolist() == [0], "the data"),
        (lambda x: x.numpy()[0] > 0, "the data"),
        (lambda x: x.data_ptr() % 16 == 0, "the data"),
        (lambda x: x.storage_offset() % 4 == 0, "storage_offset"),
        (lambda x: not x.requires_grad, "requires_grad"),
        (lambda x: x._version == 0, "_version"),
        (lambda x: not x.is_pinned(), "is_pinned"),
    ],
)
def test_supports_may_read_metadata_alone(namespace, supports, read):
    op = define(namespace, priority=["fast"])
    op.register_kernel(TYPE, adding(10), provider="fast", supports=supports)
    match = rf"{namespace}::op: the provider 'fast': supports read {read} of a tensor. It may read"
    for _ in range(2):
        with pytest.raises(torchop.ProviderError, match=match):
            value(op)


@pytest.mark.parametrize(
    ("supports", "words"),
    [
        (lambda x: x > 0, "must return a bool, but returned a tensor"),
        (lambda x: None, "must return a bool, but returned None"),
        (lambda x: 1, "must return a bool, but returned 1"),
        (lambda x: x.nothing, "raised AttributeError: .*nothing"),
    ],
)
def test_invalid_result_of_supports_is_rejected(namespace, supports, words):
    op = define(namespace, priority=["fast"])
    op.register_kernel(TYPE, adding(10), provider="fast", supports=supports)
    with pytest.raises(torchop.ProviderError, match=f"the provider 'fast': supports {words}"):
        value(op)


def test_slow_supports_warns_once(namespace):
    op = define(namespace, priority=["fast"])

    def supports(x):
        time.sleep(0.051 if x.shape[0] != 2 else 0)
        return True

    op.register_kernel(TYPE, adding(10), provider="fast", supports=supports)
    for size in (1, 2, 3, 4):  # size 2 is fast, so the count of slow calls restarts
        assert value(op, torch.zeros(size)) == 10
    words = r"op: the provider 'fast': supports is slow: it took \d\d+ ms .* `supported`"
    with pytest.warns(torchop.ProviderWarning, match=words):
        assert value(op, torch.zeros(5)) == 10
    for size in (6, 7, 8, 9):
        assert value(op, torch.zeros(size)) == 10


@pytest.mark.filterwarnings("ignore::torchop.ProviderWarning")
def test_lists_of_tensors_and_missing_tensors(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(xs: list[Tensor], bias: Tensor | None = None) -> Tensor:
        return xs[0].clone()

    def supports(xs, bias):
        return len(xs) == 2 and bias is None and xs[1].ndim == 1

    op.register_kernel(TYPE, lambda xs, bias: xs[0] + 10, provider="fast", supports=supports)
    op.set_priority(["fast"])
    x = torch.zeros(1)
    assert value(op, [x, x]) == 10
    assert value(op, [x]) == 0
    assert value(op, [x, x[None]]) == 0
    assert value(op, [x, x], x) == 0


def test_structured_arguments(namespace):
    @dataclasses.dataclass
    class Pair:
        first: Tensor
        second: Tensor

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(pair: Pair, scale: float = 1.0) -> Tensor:
        return pair.first * scale

    seen = []

    def supports(pair, scale):
        seen.append(type(pair))
        return pair.second.ndim == 1

    op.register_kernel(
        TYPE, lambda pair, scale=1.0: pair.first + 10, provider="a", supports=supports
    )
    op.set_priority(["a"])
    assert value(op, Pair(torch.zeros(1), torch.zeros(1))) == 10
    assert seen == [Pair]
    with pytest.raises(torchop.RuleSignatureError, match=r"has the default 2\.0 for 'scale'"):
        op.register_kernel(TYPE, lambda pair, scale=2.0: pair.first, provider="b")


# --------------------------------------------------------------------------------------------------
# The rules of the operator apply to every provider


@pytest.fixture(params=["reference", "by_numpy", "asking"])
def ruled(request, namespace):
    """Define an operator with every rule, which squares a tensor with the given provider."""

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x * x

    @op.register_kernel(TYPE, provider="by_numpy")
    def kernel(x):
        return torch.from_numpy(x.detach().contiguous().numpy() ** 2)

    op.register_kernel(TYPE, kernel, provider="asking", supports=lambda x: x.ndim < 3)
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * 2 * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
    op.register_autocast(TYPE, torch.float64)
    op.set_priority([request.param])
    return op


def test_gradients(ruled):
    x = torch.tensor([3.0], requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(ruled, (x,))
    assert torch.autograd.grad(ruled(x), x)[0].item() == 6


def test_vmap_autocast_and_fake_tensors(ruled):
    assert torch.vmap(ruled)(torch.full((2, 2), 3.0)).tolist() == [[9.0, 9.0]] * 2
    with torch.autocast(TYPE, dtype=torch.bfloat16):
        assert ruled(torch.ones(2)).dtype is torch.float64
    with torch._subclasses.FakeTensorMode():
        assert ruled(torch.empty(3, 2)).shape == (3, 2)
    assert ruled(torch.ones(2, device="meta")).is_meta


@needs_context_in_backward
@pytest.mark.filterwarnings("ignore::torchop.ProviderWarning")
def test_a_backward_kernel_of_each_provider(namespace):
    ran = []

    @torchop.custom_op(f"{namespace}::square_backward", mutates_args=())
    def backward(grad: Tensor, x: Tensor) -> Tensor:
        ran.append("reference")
        return 2 * grad * x

    @backward.register_kernel(TYPE, provider="fast", supports=lambda grad, x: x.ndim == 1)
    def _(grad, x):
        ran.append("fast")
        return grad * (x + x)

    @torchop.custom_op(f"{namespace}::square", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x * x

    op.register_kernel(TYPE, lambda x: x**2, provider="fast")
    op.register_fake(torch.empty_like)
    backward.register_fake(lambda grad, x: torch.empty_like(x))
    op.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    square = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    for function in (op, square):
        for shape, expected in (((3,), "fast"), ((3, 1), "reference")):
            x = torch.full(shape, 3.0, requires_grad=True)
            with torchop.priority({f"{namespace}::square*": ["fast"]}):
                function(x).sum().backward()
            assert x.grad.flatten().tolist() == [6.0] * 3
            assert ran == [expected]
            ran.clear()


def test_a_mutable_operator(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.add_(1)

    op.register_kernel(TYPE, lambda x: x.add_(10) and None, provider="ten")
    op.set_priority(["ten"])
    x = torch.zeros(1)
    version = x._version
    op(x)
    assert (x.item(), x._version > version) == (10, True)
    functional = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    functional(x)
    assert x.item() == 20


def test_factories_choose_by_their_device(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(n: int, device: torch.device) -> Tensor:
        return torch.ones(n, device=device)

    op.register_kernel(
        TYPE, lambda n, device: torch.zeros(n), provider="zeros", supports=lambda n, device: n > 1
    )
    op.set_priority(["zeros", "reference"])
    assert op(2, DEVICE).tolist() == [0, 0]
    assert op(1, DEVICE).tolist() == [1]
    assert torchop.explain(op, 2, DEVICE).provider == "zeros"


@needs_native
@pytest.mark.parametrize("asks", [False, True])
def test_calls_stay_native(namespace, asks):
    assert torchop.native.wait()
    op = define(namespace, priority=["ten"])
    options = {"supports": lambda x: True} if asks else {}
    op.register_kernel(TYPE, adding(10), provider="ten", **options)
    value(op)
    assert torchop.explain(op, torch.zeros(1)).native
    assert value(op) == 10
    assert torch.ops.__getattr__(namespace).op(torch.zeros(1)).item() == 10


def test_without_supports_the_plan_contains_the_function_itself():
    program = """
        import torch, torchop
        from torchop._rules.kernels.rule import KernelRule
        schema = "(Tensor x) -> Tensor"
        op = torchop.custom_op("lib::op", lambda x: x + 1, mutates_args=(), schema=schema)
        def ten(x):
            return x + 10
        op.register_kernel("cpu", ten, provider="ten")
        def function():
            return op._definition.plan[KernelRule].functions["cpu"]
        print(function() is op._init_fn)
        op.set_priority(["ten"])
        print(function() is ten)
        with torchop.priority({op: ["reference"]}):
            print(function() is ten, op(torch.zeros(1)).item())
        print(op(torch.zeros(1)).item())
    """
    assert assert_clean(run_forked(program)).split() == ["True", "True", "False", "1.0", "10.0"]


# --------------------------------------------------------------------------------------------------
# Compiled graphs


@pytest.mark.filterwarnings("ignore::torchop.ProviderWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_opaque_operator_chooses_in_a_graph_as_in_eager(namespace, dynamic):
    op = define(namespace, priority=["small"])
    op.register_fake(torch.empty_like)
    op.register_kernel(TYPE, adding(10), provider="small", supports=lambda x: len(x) < 10)
    op.register_kernel(TYPE, adding(20), provider="any")
    compiled = torch.compile(
        lambda x: op(x) * 1, backend="aot_eager", dynamic=dynamic, fullgraph=True
    )
    for size in (2, 3, 30, 4):
        assert value(compiled, torch.zeros(size)) == (10 if size < 10 else 1)
        with torchop.priority({op: ["any"]}):
            assert value(compiled, torch.zeros(size)) == 20


@pytest.mark.filterwarnings("ignore::torchop.ProviderWarning")
def test_an_inlined_operator_traces_the_provider_with_guards(namespace):
    op = define(namespace, compile="inline", priority=["small"])

    def supports(x):
        return x.shape[0] <= 10  # not `len(x)`, which would specialize a symbolic size

    op.register_kernel(TYPE, lambda x: x.sin() + 10, provider="small", supports=supports)
    graphs = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def compiler(lowered, inputs):
            graphs.append({str(node.target) for node in lowered.graph.nodes})
            return lowered.forward

        return aot_autograd(fw_compiler=compiler)(graph, inputs)

    compiled = torch.compile(lambda x: op(x) * 1, backend=backend, dynamic=True, fullgraph=True)
    assert value(compiled, torch.zeros(5)) == 10
    assert value(compiled, torch.zeros(7)) == 10
    assert len(graphs) == 1  # the size is symbolic, so it was not compiled again
    assert "aten.sin.default" in graphs[0]
    assert value(compiled, torch.zeros(50)) == 1
    assert value(compiled, torch.zeros(60)) == 1
    assert len(graphs) == 2
    assert "aten.sin.default" not in graphs[1]


def test_a_priority_block_is_not_traced(namespace):
    op = define(namespace)
    op.register_kernel(TYPE, adding(10), provider="ten")

    def function(x):
        with torchop.priority({f"{namespace}::op": ["ten"]}):
            return op(x)

    compiled = functools.partial(torch.compile, function, backend="aot_eager")
    with pytest.raises(
        RuntimeError, match=r"cannot trace torchop\.priority.* Open the block around"
    ):
        compiled(fullgraph=True)(torch.zeros(1))
    assert value(compiled()) == 10


@pytest.mark.parametrize("native", [True, False])
def test_a_derived_formula_differentiates_the_reference(namespace, native):
    """Autograd may not be able to differentiate the other providers."""
    op = define(namespace, priority=["numpy"])
    op.derive_autograd()
    calls = []

    @op.register_kernel(TYPE, provider="numpy")
    def _(x):
        calls.append(x)
        result = torch.empty(x.shape)
        result.numpy()[:] = x.detach().numpy() + 1
        return result

    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        with torch.enable_grad() if native else torchop.native.disabled():
            result = op(x)
            result.backward(torch.full((3,), 5.0))
        assert result.tolist() == [2, 2, 2]
        assert x.grad.tolist() == [5, 5, 5]
    assert len(calls) == 3
    calls.clear()
    assert op(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(calls) == 1


def test_caches_of_graphs_notice_an_order_where_kernels_are_traced(namespace):
    inlined = define(namespace, compile="inline")
    inlined.register_kernel(TYPE, adding(10), provider="ten")
    tag = torchop.cache_key_tag()
    with torchop.priority({f"{namespace}::op": ["ten"]}):
        in_block = torchop.cache_key_tag()
    torchop.set_priority({f"{namespace}::op": ["ten"]})
    assert torchop.cache_key_tag() == in_block != tag
    torchop.set_priority({f"{namespace}::op": None})
    assert torchop.cache_key_tag() == tag
    inlined.register_kernel(TYPE, lambda x: x + 11, provider="ten")
    assert torchop.cache_key_tag() != tag


def test_caches_of_graphs_that_call_the_operator_do_not_depend_on_orders(namespace):
    op = define(namespace)
    op.register_kernel(TYPE, adding(10), provider="ten")
    tag = torchop.cache_key_tag()
    with torchop.priority({f"{namespace}::op": ["ten"]}):
        assert torchop.cache_key_tag() == tag
