"""An operator gets its arguments in the layouts that it declares."""

import dataclasses
import pickle
from typing import Annotated

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import DEVICE, TYPE

BACKENDS = (None, "aot_eager", "inductor")
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "sliced": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
    "expanded": lambda x: x[:1].expand_as(x),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


def images():
    return torch.arange(48.0, device=DEVICE).view(2, 3, 2, 4)


def strides_of(namespace, layout, form="custom_op"):
    """Define an operator that returns the memory of `x` in order, and a list of seen strides."""
    seen = []

    def kernel(x: Annotated[Tensor, layout], y: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.as_strided((x.numel(),), (1,)) + y

    def fake(x, y):
        seen.append(x.stride())
        return x.new_empty(x.numel())

    def setup_context(ctx, inputs, output):
        seen.append(inputs[0].stride())
        ctx.shape, ctx.strides = inputs[0].shape, inputs[0].stride()

    def backward(ctx, grad):
        x = torch.empty_strided(ctx.shape, ctx.strides, dtype=grad.dtype, device=grad.device)
        return x.as_strided((x.numel(),), (1,)).copy_(grad).as_strided(x.shape, x.stride()), None

    name = f"{namespace}::op"
    if form == "class":

        @torchop.operator(name)
        class op:
            forward = staticmethod(kernel)

    elif form == "library":
        torchop.define(name, "(Tensor x, Tensor y) -> Tensor")
        torchop.impl(name, "default", kernel)
        torchop.register_layout(name, x=layout)
    else:
        op = torchop.custom_op(name, kernel, mutates_args=())
    torchop.register_fake(name, fake)
    torchop.register_autograd(name, backward, setup_context=setup_context)
    if form in ("library", "torch.ops"):
        op = getattr(torch.ops, namespace).op
    return op, seen


DECLARED = ["contiguous", "channels_last"]
FORMS = ["custom_op", "torch.ops", "class", "library"]
GIVEN = [name for name in LAYOUTS if name != "expanded"]


def compare_in_every_mode(called, declared, given):
    """Call an operator of `strides_of` with and without gradients, and compare its results."""
    right = LAYOUTS[declared](images())
    expected = right.as_strided((48,), (1,)) + 1
    x, y = LAYOUTS[given](images()), torch.ones(1, device=DEVICE)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(called(x, y), expected, rtol=0, atol=0)
    x = x.detach().requires_grad_()
    weight = torch.arange(48.0, device=DEVICE)
    (called(x, y) * weight).sum().backward()
    grad = torch.empty_like(right).copy_(x.grad).as_strided((48,), (1,))
    torch.testing.assert_close(grad, weight, rtol=0, atol=0)


@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_and_formulas_see_the_declared_layout(namespace, form, declared):
    op, seen = strides_of(namespace, getattr(torchop, declared), form)
    for given in GIVEN:
        compare_in_every_mode(op, declared, given)
    assert set(seen) == {LAYOUTS[declared](images()).stride()}


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_calls_see_the_declared_layout(namespace, form, declared, given, backend):
    op, seen = strides_of(namespace, getattr(torchop, declared), form)
    compiled = torch.compile(lambda x, y: op(x, y), backend=backend, fullgraph=True)
    compare_in_every_mode(compiled, declared, given)
    assert set(seen) == {LAYOUTS[declared](images()).stride()}


@pytest.mark.parametrize("declared", DECLARED)
def test_expanded_meta_and_fake_tensors(namespace, declared):
    layout = getattr(torchop, declared)
    op, seen = strides_of(namespace, layout)
    x, y = LAYOUTS["expanded"](images()), torch.ones(1, device=DEVICE)
    assert op(x, y).shape == (48,)
    op(x.to("meta"), y.to("meta"))
    with torch._subclasses.FakeTensorMode() as mode:
        op(mode.from_tensor(x), mode.from_tensor(y))
    assert set(seen) == {LAYOUTS[declared](images()).stride()}


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_trace_contains_the_copy(namespace, dynamic):
    from torch._dynamo.backends.common import aot_autograd

    op, _ = strides_of(namespace, torchop.contiguous)
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    f = torch.compile(
        lambda x, y: op(x, y), backend=aot_autograd(fw_compiler=keep), dynamic=dynamic
    )
    y = torch.ones(1, device=DEVICE)
    f(LAYOUTS["transposed"](images()), y)
    f(images(), y)
    called = f"{namespace}.op.default"
    assert [[n for n in names if "aten.clone" in n or n == called] for names in graphs] == [
        ["aten.clone.default", called],
        [called],
    ]


def test_an_argument_that_fits_is_not_copied(namespace):
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Annotated[Tensor, torchop.contiguous]) -> Tensor:
        seen.append(x.data_ptr())
        return x.clone()

    x = images()
    op(x)
    op(x[1])
    assert seen == [x.data_ptr(), x[1].data_ptr()]
    torchop.native.wait()
    explained = torchop.explain(op, x.mT)
    assert "copied into the layout" in str(explained)
    assert not explained.native


def test_lists_optional_arguments_and_structures(namespace):
    @dataclasses.dataclass
    class Pair:
        one: Tensor
        two: Tensor | None
        factor: float

    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(
        pair: Annotated[Pair, torchop.contiguous],
        xs: list[Annotated[Tensor, torchop.contiguous]],
        maybe: Annotated[Tensor, torchop.contiguous] | None,
        free: Tensor,
    ) -> Tensor:
        tensors = [pair.one, pair.two, *xs, maybe, free]
        seen.append([None if t is None else t.is_contiguous() for t in tensors])
        return pair.one + 1

    x = torch.ones(2, 3, device=DEVICE).t()
    op(Pair(x, None, 1.0), [x, x], None, x)
    op(Pair(x, x, 1.0), [], x, x)
    assert seen == [[True, None, True, True, None, False], [True, True, True, False]]


def test_a_mutated_argument_that_does_not_fit(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("out",))
    def op(x: Tensor, out: Annotated[Tensor, torchop.contiguous]) -> None:
        out.view(-1).copy_(x.reshape(-1))

    x, out = torch.arange(6.0, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    op(x, out)
    assert out.flatten().tolist() == x.tolist()
    for call in (op, torch.compile(lambda x, out: op(x, out), backend="aot_eager")):
        with (
            torch.inference_mode(),
            pytest.raises(Exception, match=r"'out' must be contiguous, .* copy_"),
        ):
            call(x, out.t())
    with pytest.raises(torchop.ArgumentError, match=rf"{namespace}::op: argument 'out' must be"):
        op(x, out.t())
    assert out.flatten().tolist() == x.tolist()


def test_a_number_of_dimensions_without_channels_last(namespace):
    op, _ = strides_of(namespace, torchop.channels_last)
    y = torch.ones(1, device=DEVICE)
    with pytest.raises(torchop.ArgumentError, match=r"'x': torchop.channels_last needs .* 4 or 5"):
        op(torch.ones(2, 3, device=DEVICE), y)
    volume = torch.ones(1, 2, 3, 4, 5, device=DEVICE)
    assert op(volume, y).shape == (120,)


@pytest.mark.parametrize("kind", ["grad", "vmap", "vmap of grad"])
@pytest.mark.parametrize("declared", ["contiguous", "channels_last"])
def test_transforms(namespace, declared, kind):
    layout = getattr(torchop, declared)

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Annotated[Tensor, layout]) -> Tensor:
        assert layout.fits(x)
        return x * x

    op.register_autograd(
        lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    op.register_vmap("sequential")
    x = LAYOUTS["transposed"](images())
    xs = torch.stack([x, x + 1])

    def total(x):
        return op(x).sum()

    if kind == "grad":
        assert torch.equal(torch.func.grad(total)(x), 2 * x)
    elif kind == "vmap":
        assert torch.equal(torch.vmap(op)(xs), xs * xs)
    else:
        assert torch.equal(torch.vmap(torch.func.grad(total))(xs), 2 * xs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("declared", ["contiguous", "channels_last"])
def test_gradients_have_the_layout_of_the_formula(namespace, declared, kernel, backend):
    layout = getattr(torchop, declared)
    seen = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    if kernel:

        def backward_kernel(one: Annotated[Tensor, layout], two: Tensor, x: Tensor) -> Tensor:
            seen.append(layout.fits(one))
            return (one + two).contiguous()

        op.register_autograd(backward_kernel=backward_kernel)
    else:

        def backward(ctx, one: Annotated[Tensor, layout], two: Tensor):
            seen.append(layout.fits(one))
            return one + two

        op.register_autograd(backward)
    f = op if backend is None else torch.compile(lambda x: op(x), backend=backend)
    x = images().requires_grad_()
    one, two = f(x)
    weights = [LAYOUTS["transposed"](images()), LAYOUTS["expanded"](images())]
    torch.autograd.backward([one, two], weights)
    torch.testing.assert_close(x.grad, weights[0] + weights[1])
    assert set(seen) == {True}


def test_a_policy_and_a_layout(namespace):
    op, seen = strides_of(namespace, torchop.contiguous)
    torchop.register_autocast(f"{namespace}::op", "low_precision")
    x = LAYOUTS["transposed"](images())
    with torch.autocast(TYPE, dtype=torch.bfloat16):
        assert op(x, torch.ones(1, device=DEVICE)).dtype is torch.bfloat16
    assert set(seen) == {images().stride()}


def test_a_layout_that_is_registered_after_a_call(namespace):
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        seen.append(x.is_contiguous())
        return x + 1

    x = torch.ones(2, 3, device=DEVICE).t()
    op(x)
    op.register_layout(x=torchop.contiguous)
    op(x)
    torch.ops.__getattr__(namespace).op(x)
    assert seen == [False, True, True]
    assert "layouts x: contiguous" in repr(op)


def test_wrong_declarations_are_rejected(namespace):
    def scalar(x: Tensor, n: Annotated[int, torchop.contiguous]) -> Tensor:
        return x + n

    with pytest.raises(torchop.SchemaError, match=r"for 'n', .* The tensor arguments are x\."):
        torchop.custom_op(f"{namespace}::one", scalar, mutates_args=())

    def both(x: Annotated[Tensor, torchop.contiguous, torchop.channels_last]) -> Tensor:
        return x + 1

    with pytest.raises(torchop.SchemaError, match="Keep one"):
        torchop.custom_op(f"{namespace}::two", both, mutates_args=())
    op, _ = strides_of(namespace, torchop.contiguous)
    with pytest.raises(torchop.SchemaError, match=r"Pass torchop\.contiguous or"):
        op.register_layout(x="contiguous")
    with pytest.raises(torchop.SchemaError, match=r"The tensor arguments are x, y\."):
        op.register_layout(z=torchop.contiguous)


def test_layouts_can_be_pickled():
    for layout in (torchop.contiguous, torchop.channels_last):
        assert pickle.loads(pickle.dumps(layout)) is layout
