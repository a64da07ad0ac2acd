"""Compilers trace through operators of triton_op, but exported programs contain them."""

import importlib.util

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import TYPE
from tests.integration.compile.graphs import fresh_compiler, operators

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

X = torch.linspace(-1.0, 1.0, 4)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with fresh_compiler():
        yield


def define(namespace, **options):
    @torchop.triton_op(f"{namespace}::op", mutates_args=(), **options)
    def op(x: Tensor, scale: float = 2.0) -> Tensor:
        """Scales the sine."""
        from torch._library.triton import is_wrap_triton_enabled

        launches.append(is_wrap_triton_enabled())
        return x.sin() * scale

    launches = op.launches = []
    return op


def test_the_handle_is_a_custom_op_of_the_function(namespace):
    op = define(namespace)
    assert isinstance(op, torchop.CustomOp)
    assert op.__doc__ == "Scales the sine."
    assert op.__name__ == "op"
    assert str(op.schema) == f"{namespace}::op(Tensor x, float scale=2.) -> Tensor"
    assert torch.equal(op(X, 3.0), X.sin() * 3)
    assert torch.equal(torch.ops.__getattr__(namespace).op(X), X.sin() * 2)


def test_eager_calls_launch_directly_and_traces_see_the_wrapper(namespace):
    op = define(namespace)
    op(X)
    assert op.launches == [False]
    op.launches.clear()
    op(torch.empty(3, device="meta"))
    assert op.launches == [True]


def test_all_arguments_may_be_mutated(namespace):
    @torchop.triton_op(f"{namespace}::op", mutates_args="unknown")
    def op(x: Tensor, y: Tensor) -> None:
        x.copy_(y)

    x = torch.zeros(4)
    torch.compile(op, backend="aot_eager", fullgraph=True)(x, X)
    assert torch.equal(x, X)


def test_mutates_args_is_checked(namespace):
    with pytest.raises(torchop.SchemaError, match="mutates_args"):
        torchop.triton_op(
            f"{namespace}::op",
            lambda x: x + 1,
            mutates_args=("y",),
            schema="(Tensor x) -> Tensor",
        )


def test_a_schema_is_honoured(namespace):
    op = torchop.triton_op(
        f"{namespace}::op",
        lambda x, n: x * n,
        mutates_args=(),
        schema="(Tensor x, int n) -> Tensor",
    )
    assert torch.equal(op(X, 3), X * 3)
    assert str(op.schema) == f"{namespace}::op(Tensor x, int n) -> Tensor"


def test_compilers_decompose_it_but_exported_programs_contain_it(namespace):
    op = define(namespace)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda graph, i: make_boxed_func(keep(graph, i)))
    result = torch.compile(lambda x: op(x) + 1, backend=backend, fullgraph=True)(X)
    torch.testing.assert_close(result, X.sin() * 2 + 1)
    assert op.overload not in operators(graphs[0])
    assert torch.ops.aten.sin.default in operators(graphs[0])

    class Module(torch.nn.Module):
        def forward(self, x):
            return op(x)

    assert operators(torch.export.export(Module(), (X,)).graph_module) == [op.overload]


def test_all_registrations(namespace):
    op = define(namespace)
    op.register_autograd(
        lambda ctx, g: (g * 2 * ctx.saved_tensors[0].cos(), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        jvp=lambda ctx, dx, scale: dx * 2 * ctx.saved_tensors[0].cos(),
    )
    op.register_vmap("sequential")
    x = X.double().requires_grad_()
    assert torch.autograd.gradcheck(op, (x,), check_forward_ad=True)
    torch.testing.assert_close(torch.vmap(op)(X), X.sin() * 2)
    torchop.opcheck(op, (X.clone().requires_grad_(),))
    op.register_kernel(TYPE, lambda x, scale=2.0: x * 0)
    assert not op(X).any()


def test_compiled_calls_run_the_kernel_that_a_device_has(namespace):
    @torchop.triton_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        a_kernel[(1,)](x, out)  # type: ignore[name-defined]  # noqa: F821  (Triton may be missing)
        return out

    op.register_kernel(TYPE, lambda x: x + 1)
    compiled = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        Exception,
        match=rf"{namespace}::op: register a fake kernel for compiled calls of the kernel for "
        rf"{TYPE}: the function raised NameError: ",
    ) as caught:
        compiled(X)
    assert "TracingError" in str(caught.value)
    op.register_fake(like="x")
    assert torch.equal(compiled(X), (X + 1) * 2)


def test_a_function_whose_variables_are_assigned_later(namespace, monkeypatch):
    def kernels_of(function):
        raise ValueError("Cell is empty")  # what PyTorch raises where Triton is installed

    monkeypatch.setattr(torch._library.triton, "get_inner_triton_kernels", kernels_of)
    monkeypatch.setattr("torchop._compat.compilers.find_spec", lambda name: name)
    assert torch.equal(define(namespace)(X), X.sin() * 2)


@needs_triton
@pytest.mark.cuda
def test_a_triton_kernel(namespace):
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(out + offsets, tl.load(x + offsets, mask=mask) + 1, mask=mask)

    @torchop.triton_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        n = out.numel()
        torchop.wrap_triton(kernel)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n, 16)
        return out

    x = torch.randn(100, device="cuda")
    assert torch.equal(op(x), x + 1)
    assert torch.equal(torch.compile(lambda x: op(x) * 2, fullgraph=True)(x), (x + 1) * 2)
