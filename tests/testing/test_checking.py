"""Inside of a `checking` block, undeclared mutations raise an error. Uses private names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import BACKEND, TYPE, needs_context_in_backward
from torchop._rules.kernels.rule import KernelRule
from torchop.testing import _checking

MUTATED = "is not defined as mutable but was mutated"


def adds(x: Tensor) -> Tensor:
    (x if x.layout is torch.strided else x.values()).add_(1)
    return x.clone()


def keeps(x: Tensor) -> Tensor:
    return x.clone()


def define(namespace: str, kernel: Callable[..., Any] = adds, name: str = "op", **options: Any):
    options.setdefault("mutates_args", ())
    return torchop.custom_op(f"{namespace}::{name}", kernel, **options)


CALLS: dict[str, Callable[[Any], Any]] = {
    "handle": lambda op: op(torch.zeros(2)),
    "overload": lambda op: op.overload(torch.zeros(2)),
    "packet": lambda op: getattr(getattr(torch.ops, op._namespace), op._name)(torch.zeros(2)),
    "keyword": lambda op: op(x=torch.zeros(2)),
    "no_grad": lambda op: torch.no_grad()(op)(torch.zeros(2)),
    "inference": lambda op: torch.inference_mode()(op)(torch.zeros(2)),
    "dispatcher": lambda op: _through_the_dispatcher(op),
    "gradient": lambda op: op(torch.zeros(2, requires_grad=True)),
    "functorch": lambda op: torch.func.vjp(op, torch.zeros(2)),
    "sparse": lambda op: op(torch.eye(2).to_sparse()),
    "compiled": lambda op: torch.compile(op, backend="aot_eager", fullgraph=True)(torch.zeros(2)),
}


def _through_the_dispatcher(op: Any) -> Any:
    with torchop.native.disabled():
        return op(torch.zeros(2))


def _differentiable(namespace: str, kernel: Callable[..., Any]) -> Any:
    op = define(namespace, kernel)
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: grad)
    return op


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("called_before", [False, True])
def test_undeclared_mutation_is_detected_for_every_kind_of_call(
    namespace: str, call: Callable[[Any], Any], called_before: bool
) -> None:
    op = _differentiable(namespace, adds)
    if called_before:
        call(op)
    with (
        torchop.testing.checking(),
        pytest.raises(RuntimeError, match=f"{namespace}::op: Argument x") as e,
    ):
        call(op)
    assert isinstance(e.value, torchop.UndeclaredMutationError)
    assert MUTATED in str(e.value)
    assert "mutates_args" in str(e.value)
    call(op)  # outside of the block, the mutation does not raise


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_correct_kernel_passes(namespace: str, call: Callable[[Any], Any]) -> None:
    op = _differentiable(namespace, keeps)
    with torchop.testing.checking():
        call(op)


def test_declared_mutation_passes_even_if_values_do_not_change(namespace: str) -> None:
    def kernel(x: Tensor, amount: float) -> None:
        x.add_(amount)

    op = define(namespace, kernel, mutates_args={"x"})
    with torchop.testing.checking():
        op(torch.zeros(2), 1.0)
        op(torch.zeros(2), 0.0)
        op(torch.zeros(2, requires_grad=True).detach(), 1.0)


def test_mutation_through_numpy_is_detected(namespace: str) -> None:
    def kernel(x: Tensor) -> Tensor:
        x.numpy()[::-1].sort()
        return torch.from_numpy(np.sin(x.numpy()))

    with (
        torchop.testing.checking(),
        pytest.raises(torchop.UndeclaredMutationError, match="changed its values"),
    ):
        define(namespace, kernel)(torch.arange(4.0))


def test_message_names_the_mutated_list_item(namespace: str) -> None:
    def kernel(xs, y):
        for x in xs:
            if x is not None and len(x):
                x.mul_(2)

    op = define(
        namespace,
        kernel,
        schema="(Tensor?[] xs, Tensor(a!) y) -> ()",
        mutates_args={"y"},
    )
    with torchop.testing.checking():
        op([None, torch.empty(0)], torch.ones(2))
        with pytest.raises(torchop.UndeclaredMutationError, match=r"input 'xs\[2\]'"):
            op([None, torch.empty(0), torch.ones(2)], torch.ones(2))


def test_device_kernels_and_kernels_of_other_operators_are_checked(namespace: str) -> None:
    op = define(namespace, keeps)
    op.register_kernel(TYPE, adds)
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("other(Tensor x) -> Tensor")
        torchop.register_kernel(f"{namespace}::other", TYPE, adds, lib=library)
        with torchop.testing.checking():
            for called in (op, getattr(torch.ops, namespace).other):
                with pytest.raises(torchop.UndeclaredMutationError, match=MUTATED):
                    called(torch.zeros(2))
            with op.set_kernel_enabled(TYPE, enabled=False):
                op(torch.zeros(2))


@pytest.mark.parametrize("with_keyset", [False, True])
@pytest.mark.parametrize("called_before", [False, True])
def test_kernels_registered_with_a_library_are_checked(
    namespace: str, with_keyset: bool, called_before: bool
) -> None:
    kernel = (lambda keyset, x: adds(x)) if with_keyset else adds
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", kernel, BACKEND, with_keyset=with_keyset)
        op = getattr(torch.ops, namespace).op
        for _ in range(3 * called_before):
            op(torch.zeros(2))
        with torchop.testing.checking():
            for _ in range(3):
                with pytest.raises(torchop.UndeclaredMutationError, match=f"{namespace}::op: Arg"):
                    op(torch.zeros(2))
        for _ in range(3):
            op(torch.zeros(2))


def test_calls_from_kernels_are_checked(namespace: str) -> None:
    inner = define(namespace, adds, "inner")
    outer = define(namespace, lambda x: inner(x.clone()), "outer", schema="(Tensor x) -> Tensor")
    with (
        torchop.testing.checking(),
        pytest.raises(torchop.UndeclaredMutationError, match="::inner: Arg"),
    ):
        outer(torch.zeros(2))


@needs_context_in_backward
def test_calls_from_backward_are_checked(namespace: str) -> None:
    inner = define(namespace, adds, "inner")
    outer = define(namespace, keeps, "outer")
    outer.register_autograd(lambda ctx, grad: inner(grad.clone()))
    y = outer(torch.zeros(2, requires_grad=True)).sum()
    with (
        torchop.testing.checking(),
        pytest.raises(torchop.UndeclaredMutationError, match="::inner: Arg"),
    ):
        y.backward()


# --------------------------------------------------------------------------------------------------
# Entering and leaving the block


def test_blocks_may_be_nested_and_may_raise(namespace: str) -> None:
    op = define(namespace)
    block = torchop.testing.checking()
    with block:
        with pytest.raises(KeyError), block, torchop.testing.checking():
            raise KeyError
        with pytest.raises(torchop.UndeclaredMutationError):
            op(torch.zeros(2))
    op(torch.zeros(2))
    assert _checking._blocks == len(_checking._thread.open_blocks) == 0


def test_function_may_be_decorated(namespace: str) -> None:
    op = define(namespace)

    @torchop.testing.checking()
    def run(depth: int) -> None:
        if depth:
            run(depth - 1)
        else:
            op(torch.zeros(2))

    for _ in range(2):
        with pytest.raises(torchop.UndeclaredMutationError):
            run(2)
    op(torch.zeros(2))


def test_exception_of_the_kernel_is_raised_unchanged(namespace: str) -> None:
    def kernel(x: Tensor) -> Tensor:
        x.add_(1)
        raise KeyError("mine")

    with torchop.testing.checking(), pytest.raises(KeyError, match="mine"):
        define(namespace, kernel)(torch.zeros(2))


def test_other_threads_are_not_checked(namespace: str) -> None:
    op = define(namespace)
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(op(torch.zeros(2)).tolist())
        except RuntimeError as error:
            results.append(error)

    with torchop.testing.checking():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        with pytest.raises(torchop.UndeclaredMutationError):
            op(torch.zeros(2))
    assert results == [[1.0, 1.0]]


def test_operator_defined_in_a_block_is_checked_only_there(namespace: str) -> None:
    with torchop.testing.checking():
        op = define(namespace)
        with pytest.raises(torchop.UndeclaredMutationError):
            op(torch.zeros(2))
    op(torch.zeros(2))


def test_kernel_is_not_wrapped_outside_blocks(namespace: str) -> None:
    op = define(namespace)
    plan = op._definition.plan
    assert plan[KernelRule].functions[None] is adds
    with torchop.testing.checking():
        assert op._definition.plan[KernelRule].functions[None] is not adds
    assert op._definition.plan[KernelRule].functions[None] is adds
    # After the block, the call plan must be cached again.
    assert op._definition.plan is op._definition.plan


def test_opcheck_detects_mutations_with_any_selection_of_checks(namespace: str) -> None:
    op = define(namespace)
    op.register_fake(lambda x: torch.empty_like(x))
    for check in ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"):
        with pytest.raises(torchop.testing.OpCheckError, match=MUTATED):
            torchop.opcheck(op, (torch.zeros(2),), test_utils=check)


def test_opcheck_detects_a_write_outside_a_view(namespace: str) -> None:
    def kernel(x: Tensor) -> Tensor:
        torch.empty(0).set_(x.untyped_storage()).zero_()
        return x.clone()

    op = define(namespace, kernel)
    op.register_fake(lambda x: torch.empty_like(x))
    x = torch.ones(4)
    with pytest.raises(torchop.testing.OpCheckError, match="outside the elements of this view"):
        torchop.opcheck(op, (x[:0],), test_utils="test_autograd_registration")
    assert x.tolist() == [1.0] * 4  # opcheck ran the kernel on copies


def test_decorating_a_generator_or_coroutine_raises():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(
            TypeError,
            match=f"cannot decorate .*{function.__name__}, because it is a generator or coroutine",
        ):
            torchop.testing.checking()(function)


def test_block_may_be_exited_in_another_thread():
    block = torchop.testing.checking()
    block.__enter__()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert len(_checking._thread.open_blocks) == 0
    assert _checking._blocks == 0
    with pytest.raises(RuntimeError, match="was not entered"):
        block.__exit__(None, None, None)
    assert _checking._blocks == 0


@pytest.mark.filterwarnings("ignore:.*beta state")
def test_reading_a_compressed_sparse_tensor_is_not_a_write(namespace: str) -> None:
    """`checking` cannot rely on version counters for sparse tensors in a compressed layout.

    PyTorch increments the counter three times when a kernel reads the tensor below autograd.
    """
    op = define(namespace, torch.Tensor.to_dense, schema="(Tensor x) -> Tensor")
    x = torch.eye(2).to_sparse_csr()
    with torchop.testing.checking():
        assert torch.equal(op(x), torch.eye(2))
    before = x._version
    with torch.inference_mode():
        x.to_dense()
    assert x._version == before + 3
    writes = define(namespace, adds, "writes")
    with torchop.testing.checking(), pytest.raises(torchop.UndeclaredMutationError, match=MUTATED):
        writes(x)


def _by_stock(name: str) -> Any:
    return torch.library.custom_op(name, _annotated, mutates_args=())


def _annotated(x: Tensor) -> Tensor:
    return adds(x)


def _by_library(name: str) -> Any:
    namespace, _, op = name.partition("::")
    LIBRARIES.append(torch.library.Library(namespace, "FRAGMENT"))
    LIBRARIES[-1].define(f"{op}(Tensor x) -> Tensor")
    LIBRARIES[-1].impl(op, adds, BACKEND)
    return getattr(getattr(torch.ops, namespace), op)


LIBRARIES: list[Any] = []


@pytest.mark.parametrize("define_stock", [_by_stock, _by_library])
@pytest.mark.parametrize("is_accelerated", [False, True])
def test_operators_of_other_packages_are_checked(
    namespace: str, define_stock: Callable[[str], Any], is_accelerated: bool
) -> None:
    op = define_stock(f"{namespace}::stock")
    acceleration = torchop.accelerate(f"{namespace}::*") if is_accelerated else None
    try:
        op(torch.zeros(2))
        with (
            torchop.testing.checking(),
            pytest.raises(torchop.UndeclaredMutationError, match=f"{namespace}::stock: Argument x"),
        ):
            op(torch.zeros(2))
        op(torch.zeros(2))
    finally:
        if acceleration is not None:
            acceleration.undo()
        LIBRARIES.clear()


def test_mode_ends_with_the_block(namespace: str) -> None:
    before = torch._C._len_torch_dispatch_stack()
    with torchop.testing.checking(), torchop.testing.checking():
        assert torch._C._len_torch_dispatch_stack() == before + 1
    assert torch._C._len_torch_dispatch_stack() == before
