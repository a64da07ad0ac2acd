"""Native calls inside native calls, of the same operator and of others."""

from __future__ import annotations

from torch import Tensor

from tests._support.common import assert_clean, counting, needs_native
from tests._support.forking import run_forked
from tests.native.scenarios import GRAD, T, define, inputs

pytestmark = needs_native


@GRAD
def test_endless_recursion_is_an_exception(with_grad):
    """In a program of its own: the alternative is the end of the process."""
    program = f"""
    import torch, torchop

    @torchop.custom_op("deep::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return op(x) + 1

    op.register_autograd(lambda ctx, grad: grad)
    x = torch.zeros(1, requires_grad={with_grad})
    for _ in range(3):
        try:
            op(x)
        except RecursionError:
            pass
        else:
            raise AssertionError
    counters = torchop.native.counters(op)
    assert counters["native"] > 500, counters
    """
    assert_clean(run_forked(program))


def test_depth_that_a_python_function_reaches_is_reached(namespace):
    def kernel(x: Tensor, depth: int) -> Tensor:
        return x + 1 if depth == 0 else op(x, depth - 1) + 1

    op = define(namespace, kernel, "(Tensor x, int depth) -> Tensor")
    with counting(op) as calls:
        assert op(T, 200).tolist() == [201, 201]
    assert calls == {"native": 201}


def test_operators_call_one_another(namespace):
    inner = define(namespace, lambda x: x + 1, name="inner")
    outer = define(namespace, lambda x: inner(x) * 10, name="outer")
    for op in (inner, outer):
        op.register_autograd(lambda ctx, grad: grad * 7)
    x = inputs(True)
    outer(x)
    with counting(inner) as inner_calls, counting(outer) as outer_calls:
        outer(x).sum().backward()
    assert x.grad.tolist() == [7, 7]  # what happens inside an operator is not recorded
    assert (inner_calls, outer_calls) == ({"native": 1}, {"native": 1})
