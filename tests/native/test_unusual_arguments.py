"""Native calls with unusual numbers, forms, orders and values of arguments."""

from __future__ import annotations

import functools
import math
import sys

import pytest
import torch
from torch import Tensor

from tests._support.common import assert_clean, counting, needs_native
from tests._support.forking import run_forked
from tests.native.scenarios import T, define

pytestmark = needs_native


# At most 62 tensors, because PyTorch accepts up to 64 arguments, including `n` and `k`.
@pytest.mark.parametrize("count", [1, 31, 37, 38, 39, 62])
@pytest.mark.parametrize("with_grad", [False, True])
def test_any_number_of_arguments(namespace, count, with_grad):
    names = [sys.intern(f"x{n}") for n in range(count)]
    schema = f"({', '.join(f'Tensor {name}' for name in names)}, int n=1, *, int k=2) -> Tensor"
    op = define(namespace, lambda *xs, n=1, k=2: total(*xs, k=k), schema)
    op.register_autograd(lambda ctx, grad: tuple(grad for _ in range(count)) + (None,))

    def total(*xs, k):
        return sum(xs[:-1], start=torch.zeros(1)) + xs[-1] + k

    tensors = [torch.full((1,), float(n), requires_grad=with_grad) for n in range(count)]
    expected = sum(range(count)) + 1 + 2
    op(*tensors)
    with counting(op) as calls:
        assert op(*tensors).item() == expected
        assert op(*tensors, 1, k=2).item() == expected
        assert op(**dict(zip(names, tensors, strict=True))).item() == expected
        result = op(*tensors[:1], **dict(zip(names[1:], tensors[1:], strict=True)), k=12)
        assert result.item() == expected + 10
    assert calls == {"native": 4}
    if with_grad:
        result.backward()
        assert all(tensor.grad.item() == 1 for tensor in tensors)


def test_keywords_in_any_order(namespace):
    op = define(
        namespace,
        lambda x, a=1, b=2, *, c=3: x + a * 100 + b * 10 + c,
        "(Tensor x, int a=1, int b=2, *, int c=3) -> Tensor",
    )
    with counting(op) as calls:
        assert op(c=6, b=5, a=4, x=T).tolist() == [456, 456]
        assert op(T, b=5).tolist() == [153, 153]
        assert op(T, c=6).tolist() == [126, 126]
        assert op(T, 4, c=6).tolist() == [426, 426]
    assert calls == {"native": 4}


def test_one_object_for_many_arguments(namespace):
    names = [f"x{n}" for n in range(12)]
    schema = f"({', '.join(f'Tensor {name}' for name in names)}, Tensor[] xs) -> Tensor"
    op = define(namespace, lambda *xs: sum(xs[-1]) + sum(xs[:-1]), schema)
    op.register_autograd(lambda ctx, grad: (*[grad] * 12, [grad] * 3))
    x = torch.ones(2, requires_grad=True)
    op(*[x] * 12, [x] * 3)
    with counting(op) as calls:
        result = op(*[x] * 12, [x] * 3)
    assert calls == {"native": 1}
    assert result.tolist() == [15, 15]
    result.sum().backward()
    assert x.grad.tolist() == [15, 15]


def test_kernel_gets_a_copy_of_the_callers_list(namespace):
    def kernel(xs: list[Tensor], ns: list[int]) -> Tensor:
        result = xs[0] + sum(ns)
        xs.clear()
        ns.append(3)
        return result

    op = define(namespace, kernel, "(Tensor[] xs, int[] ns=[1, 2]) -> Tensor")
    xs, ns = [torch.ones(2), T], [4, 5]
    with counting(op) as calls:
        assert op(xs, ns).tolist() == [10, 10]
        assert op(tuple(xs)).tolist() == [4, 4]
        assert op(xs).tolist() == [4, 4]
    assert calls == {"native": 3}
    assert len(xs) == 2
    assert ns == [4, 5]


WRITES = {
    "a number": "xs[0] = 3",
    "none": "xs[:] = [None, None]",
    "a string appended": "xs.append('text')",
    "itself": "xs.append(xs)",
    "nothing": "xs.clear()",
}


@pytest.mark.parametrize("with_grad", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("write", WRITES)
def test_kernel_may_write_anything_into_its_list(write, with_grad):
    """Runs in a child process, which would crash if torchop used an object that is not a tensor."""
    program = f"""
    import torch, torchop

    @torchop.custom_op("writes::op", mutates_args=())
    def op(xs: list[torch.Tensor]) -> torch.Tensor:
        result = xs[0] + 1
        {WRITES[write]}
        return result

    op.register_autograd(lambda ctx, grad: [grad, None])
    x = torch.zeros(2, requires_grad={with_grad})
    xs = [x, torch.zeros(2)]
    with torchop.native.disabled():
        assert op(xs).tolist() == [1, 1]
    for _ in range(3):
        result = op(xs)
        assert result.tolist() == [1, 1]
        if {with_grad}:
            x.grad = None
            result.sum().backward()
            assert x.grad.tolist() == [1, 1]
    assert len(xs) == 2 and xs[0] is x
    assert torchop.native.counters(op)["native"] == 3
    """
    assert_clean(run_forked(program))


def test_kernel_that_is_a_bound_method_or_an_object(namespace):
    """To insert `self`, the vectorcall of a bound method overwrites the slot before the arguments.

    Native calls must therefore leave that slot free.
    """

    class Kernel:
        amount = 5

        def method(self, x):
            return x + self.amount

        def __call__(self, x):
            return x + self.amount

    for number, kernel in enumerate(
        [Kernel().method, Kernel(), functools.partial(Kernel.method, Kernel())]
    ):
        op = define(f"{namespace}_{number}", kernel)
        for _ in range(3):
            assert op(T).tolist() == [5, 5]
            assert next(map(op, [T])).tolist() == [5, 5]


def test_zero_has_the_sign_that_the_dispatcher_gives_it(namespace):
    # The dispatcher treats -0.0 as equal to the default 0.0, so the kernel gets 0.0.
    op = define(
        namespace,
        lambda x, a=0.0: x + math.copysign(1.0, a),
        "(Tensor x, float a=0.0) -> Tensor",
    )
    with counting(op) as calls:
        assert [op(T, zero).tolist() for zero in (0.0, -0.0)] == [[1, 1], [1, 1]]
    assert calls == {"native": 1, "argument_type": 1}
