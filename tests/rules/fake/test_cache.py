"""The outputs of fake kernels that depend on metadata alone are cached."""

import os

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import assert_eq, assert_metadata_eq
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchop
from tests.integration.compile.graphs import BACKENDS, fresh_compiler
from tests.rules.fake.test_declared import LIKE


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with fresh_compiler():
        yield


def define(namespace, schema="(Tensor x) -> Tensor", function=torch.clone, **options):
    options = {"mutates_args": (), "schema": schema, **options}
    return torchop.custom_op(f"{namespace}::op", function, **options)


def counted(op, fake, **options):
    """Register a fake kernel and return a list that grows with each of its calls."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(1)
        return fake(*args, **kwargs)

    op.register_fake(counting, **options)
    return calls


def outcome(op, *args, mode=None):
    with mode or FakeTensorMode() as mode:
        return op(*[mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args])


# --------------------------------------------------------------------------------------------------
# Calls


def _two(x):
    return x.sin(), x.sum(0)


def _write(x, y):
    y.copy_(x)
    return x * 2


OPERATORS = {
    "functional": ("(Tensor x) -> Tensor", torch.clone, torch.empty_like, 1),
    "two results": (
        "(Tensor x) -> (Tensor, Tensor)",
        _two,
        lambda x: (torch.empty_like(x), x.new_empty(x.shape[1:])),
        1,
    ),
    "a list": (
        "(Tensor x) -> Tensor[]",
        lambda x: [x.clone(), x.sin()],
        lambda x: [torch.empty_like(x), torch.empty_like(x)],
        1,
    ),
    "mutating": (
        "(Tensor x, Tensor(a!) y) -> Tensor",
        _write,
        lambda x, y: torch.empty_like(x),
        2,
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_compilation_calls_a_pure_fake_kernel_at_most_twice(namespace, kind, backend, dynamic):
    schema, kernel, fake, count = OPERATORS[kind]
    written = ("y",) if kind == "mutating" else ()
    op = define(namespace, schema, kernel, mutates_args=written)
    calls = counted(op, fake, pure=True)

    def program(*args):
        result = op(*args)
        return [each + 1 for each in ([result] if isinstance(result, Tensor) else result)]

    def compile_and_compare():
        compiled = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)
        found = compiled(*[torch.ones(3, 4) for _ in range(count)])
        torch.testing.assert_close(found, program(*[torch.ones(3, 4) for _ in range(count)]))

    compile_and_compare()
    assert 1 <= len(calls) <= 2
    if not dynamic:
        torch._dynamo.reset()
        before = len(calls)
        compile_and_compare()
        assert len(calls) == before


def test_other_fake_kernels_run_in_every_call(namespace):
    op = define(namespace)
    calls = counted(op, torch.empty_like)
    for _ in range(3):
        outcome(op, torch.ones(2))
    assert len(calls) == 3


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("make", LIKE.values(), ids=LIKE)
def test_cached_outputs_have_the_metadata_of_the_first_outputs(namespace, make, requires_grad):
    op = define(namespace, "(Tensor x) -> (Tensor, Tensor, Tensor)")
    calls = counted(
        op,
        lambda x: (torch.empty_like(x), x.new_empty(3, 2).t(), x.new_empty(2, dtype=torch.int8)),
        pure=True,
    )
    with FakeTensorMode():
        x = make()
        # Without CUDA, PyTorch aborts if a fake CUDA tensor requires grad.
        if requires_grad and x.device.type == "cpu" and x.is_floating_point():
            x = x.detach().requires_grad_()
        first, second = op(x), op(x)
    assert len(calls) == (2 if x.is_sparse else 1)
    for one, other in zip(first, second, strict=True):
        assert one is not other
        if not x.is_sparse:
            assert_metadata_eq(assert_eq, one.detach(), other.detach())
        assert one.device == other.device


def test_all_that_outputs_depend_on_is_a_part_of_the_key(namespace):
    op = define(namespace, "(Tensor x, float? y=None) -> Tensor")
    calls = counted(op, lambda x, y=None: torch.full(x.shape, 1.0 if y is None else y), pure=True)
    contexts = (
        lambda: outcome(op, torch.ones(2)),
        lambda: outcome(op, torch.ones(3)),
        lambda: outcome(op, torch.ones(3, dtype=torch.int64)),
        lambda: outcome(op, torch.ones(4)[1:]),
        lambda: outcome(op, torch.ones(3), 1.0),
        lambda: outcome(op, torch.ones(3), 2.0),
    )
    for number, call in enumerate(contexts, 1):
        call()
        call()
        assert len(calls) == number
    torch.set_default_dtype(torch.float64)
    try:
        assert outcome(op, torch.ones(3, dtype=torch.float32)).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert outcome(op, torch.ones(3)).dtype is torch.float32


def test_autocast_is_a_part_of_the_key(namespace):
    op = define(namespace, "(Tensor x) -> Tensor", lambda x: x @ x)
    op.register_fake(lambda x: x @ x, pure=True)

    def program(x):
        first = op(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return first, op(x)

    found = torch.compile(program, backend="aot_eager", fullgraph=True)(torch.ones(2, 2))
    assert [each.dtype for each in found] == [each.dtype for each in program(torch.ones(2, 2))]


# --------------------------------------------------------------------------------------------------
# Symbolic sizes


def test_guards_of_a_cached_fake_kernel_are_kept(namespace):
    def half(x):
        return x[: len(x) // 2].clone() if len(x) > 8 else x.clone()

    op = define(namespace, function=half)
    op.register_fake(
        lambda x: x.new_empty(x.shape[0] // 2 if x.shape[0] > 8 else x.shape[0]), pure=True
    )
    counter = CompileCounter()

    def program(x):
        return op(x) + op(x)

    for backend in (counter, "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, dynamic=True, fullgraph=True)
        for size in (6, 7, 10, 12, 5):
            torch.testing.assert_close(compiled(torch.ones(size)), program(torch.ones(size)))
    assert counter.frame_count == 2


def test_symbolic_sizes_stay_symbolic(namespace):
    op = define(namespace, "(Tensor x, SymInt n) -> Tensor", lambda x, n: x.new_ones(n, len(x) + 1))
    calls = counted(op, lambda x, n: x.new_empty(n, x.shape[0] + 1), pure=True)
    counter = CompileCounter()

    def program(x, y):
        return op(x, y.shape[0]).sum() + op(x, y.shape[0]).sum() + op(y, x.shape[0]).sum()

    compiled = torch.compile(program, backend=counter, dynamic=True, fullgraph=True)
    for sizes in ((3, 4), (5, 6), (7, 3)):
        args = [torch.ones(size) for size in sizes]
        torch.testing.assert_close(compiled(*args), program(*args))
    assert counter.frame_count == 1
    assert len(calls) == 2  # for each order of the arguments


def test_each_call_creates_its_own_data_dependent_size(namespace):
    op = define(namespace, function=torch.nonzero)
    calls = counted(op, lambda x: x.new_empty(torchop.get_ctx().new_dynamic_size(), 1), pure=True)
    first, second = (
        outcome(op, torch.ones(3), mode=mode) for mode in [FakeTensorMode(shape_env=ShapeEnv())] * 2
    )
    assert len(calls) == 2
    assert str(first.shape[0]) != str(second.shape[0])


# --------------------------------------------------------------------------------------------------
# Changes

WIDTH = 2


def _width():
    return WIDTH


def _wide(x):
    return x.new_empty(_width())


def test_a_new_fake_kernel_has_a_new_cache(namespace):
    op = define(namespace)
    for size in (2, 3):
        op.register_fake(lambda x, size=size: x.new_empty(size), pure=True)
        assert outcome(op, torch.ones(1)).shape == (size,)


@pytest.mark.parametrize("declared", [False, True])
def test_a_change_of_a_constant_clears_the_cache(namespace, declared, monkeypatch):
    op = define(namespace)
    if declared:
        op.register_fake(shape=lambda x: (_width(),))
    else:
        op.register_fake(_wide, pure=True)
    assert outcome(op, torch.ones(1)).shape == (2,)
    monkeypatch.setitem(globals(), "WIDTH", 5)
    assert outcome(op, torch.ones(1)).shape == (5,)


def test_a_change_of_a_function_clears_the_cache(namespace, monkeypatch):
    op = define(namespace)
    op.register_fake(_wide, pure=True)
    assert outcome(op, torch.ones(1)).shape == (2,)
    monkeypatch.setitem(globals(), "_width", lambda: 7)
    assert outcome(op, torch.ones(1)).shape == (7,)
    monkeypatch.setattr(_wide, "__code__", (lambda x: x.new_empty(9)).__code__)
    assert outcome(op, torch.ones(1)).shape == (9,)


def test_a_change_of_an_operator_that_the_fake_kernel_calls_clears_the_cache(namespace):
    inner = torchop.custom_op(
        f"{namespace}::inner", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    inner.register_fake(lambda x: x.new_empty(2))
    op = define(namespace)
    op.register_fake(lambda x: inner(x), pure=True)
    assert outcome(op, torch.ones(1)).shape == (2,)
    inner.register_fake(lambda x: x.new_empty(3))
    assert outcome(op, torch.ones(1)).shape == (3,)


# --------------------------------------------------------------------------------------------------
# Functions that compute shapes


def test_a_shape_is_computed_once_for_equal_metadata(namespace):
    op = define(namespace)
    calls = []

    def shape(x):
        calls.append(1)
        return tuple(x.shape)

    op.register_fake(shape=shape)
    for _ in range(3):
        outcome(op, torch.ones(2, 3))
    assert len(calls) == 1
    outcome(op, torch.ones(2, 4))
    assert len(calls) == 2


def test_a_shape_that_may_depend_on_anything_else_is_not_cached(namespace, monkeypatch):
    op = define(namespace)
    op.register_fake(shape=lambda x: (int(os.environ["TORCHOP_TEST_SIZE"]),))
    for size in (2, 3):
        monkeypatch.setenv("TORCHOP_TEST_SIZE", str(size))
        assert outcome(op, torch.ones(1)).shape == (size,)


def test_residuals_are_returned_in_every_call(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: torchop.residuals(x.exp(), x.exp()),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        residuals={"exp": Tensor},
    )
    op.register_fake(
        lambda x: torchop.residuals(torch.empty_like(x), torch.empty_like(x)), pure=True
    )
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(residuals.exp),
    )
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: op(op(x)), backend="aot_eager", fullgraph=True)(x).sum().backward()
        torch._dynamo.reset()
        expected = torch.ones(3, requires_grad=True)
        op(op(expected)).sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)
