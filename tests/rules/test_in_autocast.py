"""Without an autocast rule, a kernel runs in the same autocast state in eager and compiled code."""

import dataclasses
import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import torchop
from tests._support.devices import DEVICE, TYPE

BACKENDS = ("aot_eager", "inductor")
LOWER = torch.bfloat16


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w)


def operator(namespace, function=matmul, fake=None, **options):
    op = torchop.custom_op(f"{namespace}::op", function, **{"mutates_args": (), **options})
    op.register_fake(fake or function)
    return op


def square(count=1):
    torch.manual_seed(0)
    values = [torch.randn(8, 8, device=DEVICE) for _ in range(count)]
    return values if count > 1 else values[0]


def check(f, *args, backend, dtype=LOWER, dynamic=False, options=None):
    """Compare eager with compiled code in an autocast region, exactly."""

    def copies():
        return [a.clone() if isinstance(a, Tensor) else a for a in args]

    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        expected, inputs = copies(), copies()
        with torch.autocast(TYPE, dtype=dtype):
            right, got = f(*expected), compiled(*inputs)
        torch.testing.assert_close(got, right, rtol=0, atol=0)
        torch.testing.assert_close(inputs, expected, rtol=0, atol=0)
    return right


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, LOWER])
def test_the_dtype_of_the_region_applies(namespace, backend, dtype, dynamic):
    op = operator(namespace)
    result = check(
        lambda x, w: op(x, w) * 2, *square(2), backend=backend, dtype=dtype, dynamic=dynamic
    )
    assert result.dtype is dtype


def test_regions_inside_the_compiled_function(namespace, backend):
    op = operator(namespace)

    def f(x, w):
        with torch.autocast(TYPE, dtype=LOWER):
            one = op(x, w)
            with torch.autocast(TYPE, enabled=False):
                two = op(x, w)
        return one, two, op(x, w)

    got, right = torch.compile(f, backend=backend)(*square(2)), f(*square(2))
    torch.testing.assert_close(got, right, rtol=0, atol=0)
    assert [each.dtype for each in right] == [LOWER, torch.float32, torch.float32]


def test_dtypes_that_only_autocast_unifies(namespace, backend):
    op = operator(namespace, fake=lambda x, w: x.new_empty(x.shape[0], w.shape[1], dtype=LOWER))
    x, w = square(2)
    check(op, x.to(LOWER), w, backend=backend)


def test_an_inlined_operator(namespace, backend):
    op = torchop.custom_op(f"{namespace}::op", matmul, mutates_args=(), compile="inline")
    assert check(lambda x, w: op(x, w) + 1, *square(2), backend=backend).dtype is LOWER


def test_a_random_operator(namespace, backend):
    def function(x: Tensor) -> Tensor:
        return torch.mm(torch.rand_like(x), x)

    op = operator(namespace, function, tags=torch.Tag.nondeterministic_seeded)
    f = torch.compile(lambda x: (op(x), op(x)), backend=backend, fullgraph=True)
    with torch.autocast(TYPE, dtype=LOWER):
        one, two = f(square())
    assert one.dtype is LOWER
    assert not torch.equal(one, two)


def test_an_operator_with_an_effect(namespace, backend):
    seen = []

    def function(x: Tensor, w: Tensor) -> Tensor:
        seen.append(torch.mm(x, w).dtype)
        return torch.mm(x, w)

    op = operator(namespace, function, torch.mm, effects="ordered")
    assert check(lambda x, w: op(x, w) + op(w, x), *square(2), backend=backend).dtype is LOWER
    assert seen == [LOWER] * 8


def test_an_effect_without_results(namespace, backend):
    seen = []

    def function(x: Tensor) -> None:
        seen.append(torch.mm(x, x).dtype)

    op = operator(namespace, function, lambda x: None, effects="ordered")

    def f(x):
        op(x)
        return x + 1

    check(f, square(), backend=backend)
    assert seen == [LOWER] * 4


def test_a_written_argument(namespace, backend):
    def function(x: Tensor, out: Tensor) -> None:
        out.copy_(torch.mm(x, x))

    op = operator(namespace, function, lambda x, out: None, mutates_args=("out",))

    def f(x, out):
        op(x, out)
        return out + 1

    check(f, *square(2), backend=backend)


@pytest.mark.parametrize("returned", [Tensor, list[Tensor]])
def test_a_written_argument_and_results(namespace, backend, returned):
    def function(x: Tensor, outs: list[Tensor]):
        product = torch.mm(x, x)
        for out in outs:
            out.copy_(product)
        return [product, product + 1] if returned is not Tensor else product

    def fake(x, outs):
        product = torch.mm(x, x)
        return [product, product.clone()] if returned is not Tensor else product

    function.__annotations__["return"] = returned
    op = operator(namespace, function, fake, mutates_args=("outs",))

    def f(x, one, two):
        return op(x, [one, two]), one * 2

    check(f, *square(3), backend=backend)


@pytest.mark.parametrize("form", ["inplace", "out"])
def test_derived_forms(namespace, backend, form):
    def function(x: Tensor) -> Tensor:
        return torch.mm(x, x).to(x.dtype)

    op = operator(namespace, function)
    if form == "inplace":
        in_place = op.derive_inplace()
        check(lambda x: in_place(x) + 1, square(), backend=backend)
    else:
        out_form = op.derive_out()
        check(lambda x, out: out_form(x, out=out) + 1, *square(2), backend=backend)


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_kinds_of_arguments(namespace, backend, dynamic):
    def function(
        xs: list[Tensor],
        maybe: list[Tensor | None],
        none: Tensor | None,
        size: int,
        sizes: list[int],
        scale: float,
        mode: str,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        limits: list[float],
        number: complex = 1 + 2j,
    ) -> tuple[Tensor, list[Tensor]]:
        assert none is None
        assert maybe[0] is None
        assert limits[1:] == [math.inf]
        assert mode == "a'b\\"
        products = [torch.mm(x, maybe[1]) * scale + size + sizes[1] + limits[0] for x in xs]
        return torch.ones(sizes, dtype=dtype, device=device) * number.imag, products

    op = operator(namespace, function)

    def f(x, w):
        n = x.shape[0]
        options = {"dtype": torch.float64, "device": x.device, "limits": [0.5, math.inf]}
        return op([x, w], [None, w], None, n, [n, 2], 0.25, "a'b\\", **options)

    first, products = check(f, *square(2), backend=backend, dynamic=dynamic)
    assert first.tolist() == [[2, 2]] * 8
    assert [each.dtype for each in products] == [LOWER] * 2


def test_a_float_of_the_program(namespace, backend):
    def function(x: Tensor, scale: float) -> Tensor:
        return torch.mm(x, x) * scale

    op = operator(namespace, function)
    f = torch.compile(lambda x, scale: op(x, scale) + scale, backend=backend)
    x = square()
    for scale in (1.0, 2.0, 3.0, 4.0):
        with torch.autocast(TYPE, dtype=LOWER):
            torch.testing.assert_close(f(x, scale), op(x, scale) + scale, rtol=0, atol=0)


def gradients(op, f, *inputs):
    inputs = [each.clone().requires_grad_() for each in inputs]
    with torch.autocast(TYPE, dtype=LOWER):
        result = f(*inputs)
    result.float().square().sum().backward()
    return result, *(each.grad for each in inputs)


def derived(op):
    op.derive_autograd()


def by_formula(op):
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return op(grad, w.t()), op(x.t(), grad)

    op.register_autograd(backward, setup_context=setup_context)


def by_kernel(op):
    def backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(grad, w.t()).float(), torch.mm(x.t(), grad).float()

    op.register_autograd(backward_kernel=backward)


@pytest.mark.parametrize("register", [derived, by_formula, by_kernel])
def test_gradients(namespace, backend, register):
    op = operator(namespace)
    register(op)
    compiled = torch.compile(lambda x, w: op(x, w) * 2, backend=backend, fullgraph=True)
    inputs = square(2)
    right = gradients(op, lambda x, w: op(x, w) * 2, *inputs)
    torch.testing.assert_close(gradients(op, compiled, *inputs), right, rtol=0, atol=1e-1)
    assert right[0].dtype is LOWER


def test_gradients_with_residuals(namespace, backend):
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = torch.mm(x, w)
        return torchop.residuals(product.sin(), product.cos())

    def fake(x, w):
        product = torch.mm(x, w)
        return torchop.residuals(product, product.clone())

    def setup_context(ctx, inputs, output, residuals):
        ctx.save_for_backward(*inputs, residuals.slope)

    def backward(ctx, grad):
        x, w, slope = ctx.saved_tensors
        assert slope.dtype is LOWER
        grad = grad * slope
        return torch.mm(grad, w.t()), torch.mm(x.t(), grad)

    op = operator(namespace, function, fake, residuals={"slope": Tensor})
    op.register_autograd(backward, setup_context=setup_context)
    compiled = torch.compile(lambda x, w: op(x, w) * 2, backend=backend, fullgraph=True)
    inputs = square(2)
    right = gradients(op, lambda x, w: op(x, w) * 2, *inputs)
    torch.testing.assert_close(gradients(op, compiled, *inputs), right, rtol=0, atol=1e-1)


def test_an_operator_with_a_rule_is_traced_itself(namespace):
    op = operator(namespace)
    op.register_autocast(TYPE, LOWER)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    f = torch.compile(lambda x, w: op(x, w), backend=aot_autograd(fw_compiler=keep))
    with torch.autocast(TYPE, dtype=LOWER):
        assert f(*square(2)).dtype is LOWER
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert f"{namespace}.op.default" in called
    assert not any("in_autocast" in name for name in called)


def test_two_lists(namespace):
    def function(xs: list[Tensor]) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        products = [torch.mm(x, x) for x in xs]
        return products, products[0] + 1, [products[1] + 2]

    op = operator(namespace, function)
    check(lambda x, w: op([x, w]), *square(2), backend="aot_eager")


def test_a_checkpointed_region(namespace, backend):
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(torch.is_autocast_enabled(TYPE))
        return torch.mm(x, x)

    op = operator(namespace, function, lambda x: torch.mm(x, x))
    op.register_autograd(
        lambda ctx, grad: torch.mm(grad, ctx.saved_tensors[0].t()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def f(x):
        return torch.utils.checkpoint.checkpoint(
            lambda x: op(x.sin()).cos(), x, use_reentrant=False
        )

    compiled = torch.compile(f, backend=backend, fullgraph=True)
    right = gradients(op, f, square())
    calls.clear()
    torch.testing.assert_close(gradients(op, compiled, square()), right, rtol=0, atol=1e-1)
    assert calls == [True, True]


@pytest.mark.parametrize("owner", [torch.library, torchop])
def test_an_operator_of_a_library_with_a_fake_kernel(namespace, backend, owner):
    library = owner.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x, Tensor w) -> Tensor")
    library.impl("op", matmul, "CompositeExplicitAutograd")
    torchop.register_fake(f"{namespace}::op", matmul, lib=library)
    result = check(
        lambda x, w: getattr(torch.ops, namespace).op(x, w) * 2, *square(2), backend=backend
    )
    assert result.dtype is LOWER
    library._destroy()


def test_values_read_before_a_write_are_unchanged(namespace, backend):
    @torchop.custom_op(f"{namespace}::add", mutates_args=("x",))
    def add(x: Tensor) -> None:
        x.add_(1)

    def f(x: Tensor, out: Tensor) -> None:
        y = x + 2
        add(x)
        out.copy_(y)

    check(f, *square(2), backend=backend)


def test_a_fake_kernel_that_returns_another_dtype(namespace, backend):
    op = operator(namespace, fake=lambda x, w: torch.empty_like(x))
    f = torch.compile(lambda x, w: op(x, w) + 1, backend=backend)
    with (
        torch.autocast(TYPE, dtype=LOWER),
        pytest.raises(torchop.FakeKernelError, match=r"bfloat16, but .*float32 in the fake"),
    ):
        f(*square(2))
    op.register_autocast(TYPE, torch.float32)
    with torch.autocast(TYPE, dtype=LOWER):
        assert f(*square(2)).dtype is torch.float32


def test_opcheck_in_a_region(namespace):
    with torch.autocast(TYPE, dtype=LOWER):
        assert set(torchop.opcheck(operator(namespace), square(2)).values()) == {"SUCCESS"}


def test_a_graph_from_a_cache(namespace):
    """The process that loads the graph does not trace the call."""
    op = operator(namespace)
    call = repr(
        (op._qualname, [[TYPE, ("torch", "float16")]], [("tensors", 0), ("tensors", 1)], {})
    )
    in_autocast = torch.ops.torchop.in_autocast
    (product,) = in_autocast(call, [], square(2), [], None)
    assert product.dtype is torch.float16
    op.register_fake(lambda x, w: torch.empty_like(x, dtype=torch.float64))
    with pytest.raises(torchop.FakeKernelError, match=r"float16, but .*float64 in the fake"):
        in_autocast(call, [], [each.to(LOWER) for each in square(2)], [], None)


@torchop.opaque
class Scale:
    def __init__(self, number):
        self.number = number


@torchop.opaque(value=True)
@dataclasses.dataclass(frozen=True)
class Options:
    number: int = 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_objects_of_opaque_types(namespace, backend):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, scale: Scale, scales: list[Scale], options: Options) -> Tensor:
        return (x @ x) * (scale.number + scales[0].number + options.number)

    op.register_fake(lambda x, scale, scales, options: x @ x)

    def function(x, scale, options):
        with torch.autocast(TYPE, torch.bfloat16):
            return op(x, scale, [scale], options)

    x = torch.randn(4, 4, device=DEVICE)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for scale, options in ((Scale(2), Options(3)), (Scale(4), Options(5))):
        result = compiled(x, scale, options)
        assert result.dtype is torch.bfloat16
        assert torch.equal(result, function(x, scale, options))


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("further", [set(), {torch.Tag.nondeterministic_seeded}])
def test_traces_have_the_tags_of_the_operator(namespace, further, is_autocast):
    """Inductor reads the tags, for example to exclude a call from CUDA graphs."""

    def function(x: Tensor) -> list[Tensor]:
        return [x + 1]

    tags = {torch.Tag.cudagraph_unsafe, *further}
    with torchop.Library(namespace, "FRAGMENT") as library:
        if not is_autocast:  # an operator that mutates and returns a list
            library.define("op(Tensor(a!) x) -> Tensor[]", tags=tuple(tags))
            library.impl("op", function, "CompositeExplicitAutograd")
            torchop.register_fake(f"{namespace}::op", function, lib=library)
        else:
            operator(namespace, function, tags=tuple(tags))
        op = getattr(torch.ops, namespace).op
        graphs = []

        def compiler(graph, _):
            graphs.append(graph)
            return make_boxed_func(graph)

        compiled = torch.compile(lambda x: op(x)[0], backend=aot_autograd(fw_compiler=compiler))
        with torch.autocast(TYPE, enabled=is_autocast):
            compiled(square())
    calls = [
        node.target.tags for node in graphs[0].graph.nodes if "in_autocast" in str(node.target)
    ]
    assert len(calls) == 1
    assert tags <= set(calls[0])
