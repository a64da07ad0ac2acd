"""Fake kernels that call `get_ctx`, and fake kernels that read data."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchop
from tests._support.common import on_both
from tests.rules.support import on_fake, on_meta, on_symbols


def define(namespace, fake, library=torchop):
    @library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.nonzero()

    op.register_fake(fake)
    return op


# --------------------------------------------------------------------------------------------------
# get_ctx


def test_size_that_depends_on_data_is_a_symbol(namespace):
    op = define(namespace, lambda x: x.new_empty(torchop.get_ctx().new_dynamic_size(), x.dim()))
    shape = on_symbols(op).shape
    assert isinstance(shape[0], torch.SymInt)
    assert shape[1] == 1


def test_size_that_depends_on_data_keeps_its_bounds(namespace):
    def fake(x):
        return x.new_empty(torchop.get_ctx().new_dynamic_size(min=2, max=5))

    (size,) = on_symbols(define(namespace, fake)).shape
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    assert (bounds.lower, bounds.upper) == (2, 5)


def test_torch_library_context_works_in_our_fake_kernels(namespace):
    op = define(namespace, lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
    assert isinstance(on_symbols(op).shape[0], torch.SymInt)


def test_context_works_in_a_fake_kernel_of_torch_library(namespace):
    op = define(
        namespace, lambda x: x.new_empty(torchop.get_ctx().new_dynamic_size()), torch.library
    )
    assert isinstance(on_symbols(op).shape[0], torch.SymInt)


def test_meta_tensors_have_no_sizes_that_depend_on_data(namespace):
    op = define(namespace, lambda x: x.new_empty(torchop.get_ctx().new_dynamic_size()))
    with pytest.raises(RuntimeError, match=f"{namespace}::op.*with meta Tensors .*FakeTensorMode"):
        op(torch.ones(3, device="meta"))


@pytest.mark.parametrize("make_size", ["new_dynamic_size", "create_unbacked_symint"])
def test_context_of_torch_library_raises_clearly_on_meta_tensors(namespace, make_size):
    def fake(x):
        return x.new_empty(getattr(torch.library.get_ctx(), make_size)())

    with pytest.raises(RuntimeError, match=f"{namespace}::op.*with meta Tensors .*FakeTensorMode"):
        define(namespace, fake)(torch.ones(3, device="meta"))
    assert torch.library.get_ctx() is None


def test_context_of_torch_library_is_thread_local(namespace):
    """If two threads run fake kernels at the same time, each gets the context of its own call."""
    barrier = threading.Barrier(2)
    messages = []

    def fake(x):
        barrier.wait()
        context = torch.library.get_ctx()
        barrier.wait()
        return x.new_empty(context.new_dynamic_size())

    def call(op):
        try:
            op(torch.ones(3, device="meta"))
        except RuntimeError as error:
            messages.append((op.name, str(error)))

    ops = define(namespace, fake), define(f"{namespace}_other", fake)
    threads = [threading.Thread(target=call, args=(op,)) for op in ops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(messages) == 2
    assert all(message.startswith(f"{name}: ") for name, message in messages)


def test_context_outside_a_fake_kernel_is_an_error():
    def scenario(library, namespace):
        return library.get_ctx()

    both = on_both(scenario, "unused")
    assert both.stock is None
    assert isinstance(both.ours, RuntimeError)
    assert "outside a fake kernel" in str(both.ours)


@pytest.mark.usefixtures("fake_kernels_in_threads")
def test_concurrent_fake_kernels_each_have_their_own_context(namespace):
    barrier = threading.Barrier(4)
    environments = {}

    def fake(x):
        barrier.wait()
        size = torchop.get_ctx().new_dynamic_size()
        barrier.wait()
        environments[threading.get_ident()] = size.node.shape_env
        return x.new_empty(size)

    op = define(namespace, fake)
    expected = {}

    def trace():
        environment = ShapeEnv()
        expected[threading.get_ident()] = environment
        mode = FakeTensorMode(shape_env=environment)
        x = mode.from_tensor(torch.ones(3))
        with mode:
            op(x)

    threads = [threading.Thread(target=trace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(environments) == 4
    assert all(environments[thread] is expected[thread] for thread in expected)


def test_context_belongs_to_the_innermost_fake_kernel(namespace):
    contexts = []
    inner = define(f"{namespace}_inner", lambda x: contexts.append(torchop.get_ctx()) or x.clone())

    def fake(x):
        contexts.append(torchop.get_ctx())
        result = inner(x)
        contexts.append(torchop.get_ctx())
        return result

    on_symbols(define(namespace, fake))
    before, inside, after = contexts
    assert before is after
    assert inside is not before


def test_context_ends_with_a_fake_kernel_that_raises(namespace):
    def fake(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        on_symbols(define(namespace, fake))
    with pytest.raises(RuntimeError, match="outside a fake kernel"):
        torchop.get_ctx()


# --------------------------------------------------------------------------------------------------
# Fake kernels that read data

READINGS = {
    "item": lambda x: x.new_empty(int(x.sum().item())),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "asarray": lambda x: torch.tensor(np.asarray(x)),
    "branch": lambda x: x.new_empty(1 if x.sum() > 0 else 2),
    "nonzero": lambda x: x.nonzero(),
    "tolist": lambda x: x.new_empty(len(x.tolist())),
}


@pytest.mark.parametrize("run", [on_meta, on_fake])
@pytest.mark.parametrize("fake", READINGS.values(), ids=READINGS)
def test_a_fake_kernel_that_reads_data_raises(namespace, run, fake):
    def scenario(library, namespace):
        return run(define(namespace, fake, library))

    both = on_both(scenario, namespace)
    expected = f"{namespace}::op: the fake kernel read the data of a tensor"
    assert isinstance(both.ours, RuntimeError)
    assert expected in str(both.ours)
    assert "torchop.get_ctx().new_dynamic_size()" in str(both.ours)
    assert "\n" not in str(both.ours)
    assert both.ours.__cause__ is not None
    assert "new_dynamic_size" not in str(both.stock)


@pytest.mark.parametrize("reading", ["item", "numpy", "branch"])
def test_a_fake_kernel_that_reads_data_under_a_shape_environment_raises(namespace, reading):
    op = define(namespace, READINGS[reading])
    with pytest.raises(RuntimeError, match=r"read the data of a tensor .*new_dynamic_size\(\)"):
        on_symbols(op)


def test_error_of_reading_data_has_the_type_that_compilers_expect(namespace):
    op = define(namespace, READINGS["item"])
    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        on_fake(op)
    with pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException):
        on_fake(define(f"{namespace}_nonzero", READINGS["nonzero"]))
    with pytest.raises(torchop.FakeKernelError):
        on_meta(op)
