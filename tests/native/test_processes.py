from __future__ import annotations

import os
import signal

import pytest
import torch

from tests._support.common import assert_clean, counting, needs_native, run_program
from tests._support.forking import run_forked
from tests.native.scenarios import define

pytestmark = needs_native


def test_interpreter_ends_with_graphs_and_handles_alive():
    program = """
    import atexit, enum, sys
    import torch, torchop
    from torch import Tensor

    @torchop.custom_op("shutdown::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
    )
    x = torch.ones(2, requires_grad=True)
    alive = [op(x) for _ in range(10)]
    alive.append(alive)
    sys.alive = [op(op(x)).sum(), op, op.overload, torch.ops.shutdown.op, alive]
    op.myself = op

    class AtTheEnd:
        def __init__(self, called=op):
            self.called = called

        def __del__(self, x=x):
            self.called(x)

    sys.at_the_end = AtTheEnd()
    op.at_the_end = AtTheEnd()
    # This overload has not been called before. `enum` is one of the last modules to be freed.
    enum.at_the_end = AtTheEnd(torch.ops.aten.neg.default)
    atexit.register(lambda: op(x).sum().backward())

    assert torchop.native.counters(op)["native"] > 5
    """
    assert_clean(run_program(program))
    for _ in range(2):  # run twice, because objects are freed in varying order
        assert_clean(run_forked(program))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_of_a_fork_calls_natively(namespace):
    op = define(namespace, lambda x: x + 1)
    op.register_autograd(lambda ctx, grad: grad * 5)
    t = torch.zeros(2, device="cpu")  # a forked process cannot use a GPU
    x = t.clone().requires_grad_()
    op(x)
    op(x)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            with counting(op) as calls:
                right = op(t).tolist() == [1, 1] and op(x).tolist() == [1, 1]
            op.register_kernel("cpu", lambda x: x + 2)
            right = right and op(t).tolist() == [2, 2]
            other = define(f"{namespace}_child", lambda x: x + 3)
            right = right and other(t).tolist() == [3, 3]
            status = 0 if right and calls == {"native": 2} else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
