"""Native calls of operators with kernels from `Library.impl`."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import on_both
from tests._support.devices import AUTOGRAD, BACKEND, TYPE

T = torch.arange(4.0)


class Scaled(torch.autograd.Function):
    """Multiply by 3, but with a gradient of 6, which no other formula of this file returns."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 6


def register(library, namespace, key):
    """Define an operator with a kernel for the device, and an autograd kernel.

    Return the overload, the list of kernels that ran, and the library.
    """
    ran = []

    def compute(x, scale=1):
        ran.append("CPU")
        return x * scale

    def record(x, scale=1):
        ran.append(key)
        with torch._C._AutoDispatchBelowAutograd():
            below = overload(x, scale)
        return Scaled.apply(x) if scale == 3 else below

    home = library.Library(namespace, "FRAGMENT")
    home.define("op(Tensor x, int scale=1) -> Tensor")
    home.impl("op", compute, BACKEND)
    home.impl("op", record, key)
    overload = getattr(torch.ops, namespace).op.default
    return overload, ran, home


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def called(op, x, *args):
    x = x if x.is_inference() else x.requires_grad_()
    result = op(x, *args)
    grad = None
    if result.requires_grad:
        (grad,) = torch.autograd.grad(result.sum(), x)
    return result.tolist(), type(result), grad if grad is None else grad.tolist()


def made_in_inference():
    with torch.inference_mode():
        return torch.arange(4.0)


# Maps the name of each situation to a context manager for the calls, a function that makes the
# tensor, and the number of native calls that two calls cause. The number includes the calls that
# the autograd kernel makes.
SITUATIONS = {
    "grad": (contextlib.nullcontext, T.clone, 4),
    "no grad": (torch.no_grad, T.clone, 4),
    "inference mode": (torch.inference_mode, made_in_inference, 2),
    "a tensor from inference mode": (contextlib.nullcontext, made_in_inference, 2),
    "autocast": (lambda: torch.autocast(TYPE, torch.bfloat16), T.clone, 4),
    "below autograd": (torch._C._AutoDispatchBelowAutograd, T.clone, 2),
    "a view": (contextlib.nullcontext, lambda: T.clone()[1:], 4),
    # Under a mode, neither the call nor the call that its autograd kernel makes is native.
    "a mode": (Sees, T.clone, 0),
    "a subclass": (contextlib.nullcontext, lambda: T.as_subclass(Subclass), 0),
    "a sparse tensor": (contextlib.nullcontext, T.to_sparse, 0),
}


@pytest.mark.parametrize("key", [AUTOGRAD, "Autograd"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_kernel_at_autograd_runs_natively_as_the_dispatcher_runs_it(namespace, situation, key):
    context, made, native_calls = SITUATIONS[situation]

    def scenario(library, namespace):
        op, ran, home = register(library, namespace, key)
        op(T)  # the first call is never native, but later calls may be
        ran.clear()
        outcomes = []
        before = dict(torchop.native.counters(op)) if library is torchop else {}
        for scale in (1, 3):
            with context():
                try:
                    outcomes.append(called(op, made(), scale))
                except Exception as error:
                    outcomes.append((type(error), "backend" in str(error)))
        after = torchop.native.counters(op) if library is torchop else {}
        native = after.get("native", 0) - before.get("native", 0)
        home._destroy()
        return outcomes, tuple(ran), native

    both = on_both(scenario, namespace)
    assert both.ours[:2] == both.stock[:2]
    assert both.ours[2] == native_calls


def test_kernel_at_autograd_keeps_acceleration_of_a_stock_operator(namespace):
    @torch.library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    def record(x):
        with torch._C._AutoDispatchBelowAutograd():
            return op(x) * 10

    with torchop.Library(namespace, "IMPL") as guest:
        guest.impl("op", record, AUTOGRAD)
        with torchop.accelerate(f"{namespace}::*"):
            for _ in range(3):
                assert op(T).tolist() == [10, 20, 30, 40]
            assert torchop.native.counters(op)["native"] == 3


@pytest.mark.parametrize("is_called_first", [True, False])
def test_accelerate_takes_an_operator_that_has_a_native_kernel_at_autograd(
    namespace, is_called_first
):
    others = torch.library.Library(namespace, "FRAGMENT")
    others.define("op(Tensor x) -> Tensor")
    others.impl("op", lambda x: x + 1, BACKEND)
    op = getattr(torch.ops, namespace).op.default

    def record(x):
        with torch._C._AutoDispatchBelowAutograd():
            return op(x) * 10

    with torchop.Library(namespace, "IMPL") as guest:
        guest.impl("op", record, AUTOGRAD)
        if is_called_first:
            op(T)
        with torchop.accelerate(f"{namespace}::*") as acceleration:
            assert [row.reason for row in acceleration.operators] == [""]
            op(T)
            before = torchop.native.counters(op)["native"]
            assert op(T).tolist() == [10, 20, 30, 40]
            # Two native calls: the one here, and the call that the kernel `record` makes.
            assert torchop.native.counters(op)["native"] == before + 2
        op(T)
        before = torchop.native.counters(op)["native"]
        assert op(T).tolist() == [10, 20, 30, 40]
        # Without `accelerate`, only the call here, which runs `record`, is native.
        assert torchop.native.counters(op)["native"] == before + 1
    others._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_kernel_is_native_again_after_its_override_is_removed(namespace):
    with torchop.Library(namespace, "FRAGMENT") as home:
        home.define("op(Tensor x) -> Tensor")
        home.impl("op", lambda x: x + 1, BACKEND)
        op = getattr(torch.ops, namespace).op
        op(T)
        with torchop.Library(namespace, "IMPL") as guest:
            guest.impl("op", lambda x: x + 2, BACKEND)
            for _ in range(3):
                assert op(T).tolist() == [2, 3, 4, 5]
        # The first call after a registration is removed uses the dispatcher.
        assert op(T).tolist() == [1, 2, 3, 4]
        before = torchop.native.counters(op)["native"]
        assert op(T).tolist() == [1, 2, 3, 4]
        assert torchop.native.counters(op)["native"] == before + 1


def test_a_formula_of_torch_library_is_recorded_natively(namespace):
    with (
        torchop.Library(namespace, "FRAGMENT") as home,
        torch.library._scoped_library(namespace, "FRAGMENT") as guest,
    ):
        home.define("op(Tensor x, int n=2) -> Tensor")
        home.impl("op", lambda x, n=7: x * n, BACKEND)
        op = getattr(torch.ops, namespace).op.default
        inputs_seen = []

        def setup_context(ctx, inputs, output):
            inputs_seen.append(len(inputs))

        torch.library.register_autograd(
            f"{namespace}::op",
            lambda ctx, grad: (grad * 5, None),
            setup_context=setup_context,
            lib=guest,
        )
        op(T)

        def outcomes():
            inputs_seen.clear()
            calls = [called(op, T.clone(), *args) for args in ((), (2,), (3,))]
            return calls, tuple(inputs_seen)

        with torchop.native.disabled():
            expected = outcomes()
        outcomes()
        before = torchop.native.counters(op)["native"]
        assert outcomes() == expected
        assert torchop.native.counters(op)["native"] == before + 3
