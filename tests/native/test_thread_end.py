from __future__ import annotations

import pytest

from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_forked

pytestmark = needs_native

PROGRAM = """
    import sys, threading, time
    import torch, torchop

    entered = threading.Event()
    is_prepared = False

    def wait():
        if is_prepared:
            entered.set()
            while True:
                time.sleep(0.01)

    def kernel(x: torch.Tensor, many: list[torch.Tensor]) -> torch.Tensor:
        if where == "kernel":
            wait()
        return x + 1

    def setup_context(ctx, inputs, output):
        if where == "setup_context":
            wait()

    where, grad, dynamo = sys.argv[1], sys.argv[2] == "grad", sys.argv[3] == "dynamo"
    op = torchop.custom_op("ended::op", kernel, mutates_args=())
    op.register_autograd(lambda ctx, g: (g, [g]), setup_context=setup_context)
    x = torch.ones(2, requires_grad=grad)
    for _ in range(2):
        op(x, [x])
    is_prepared = True

    def call():
        if dynamo:
            from torch._dynamo import eval_frame
            eval_frame.set_eval_frame(lambda *args: None)
        op(x, [x])

    threading.Thread(target=call, daemon=True).start()
    assert entered.wait(60)
    print("the end")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("kernel", "no grad", "no dynamo"),
        ("kernel", "grad", "dynamo"),
        ("setup_context", "grad", "no dynamo"),
    ],
)
def test_python_ends_while_a_daemon_is_in_a_kernel(arguments):
    assert assert_clean(run_forked(PROGRAM, *arguments)) == "the end\n"


def test_python_ends_while_a_daemon_compiles_a_plan():
    program = """
        import threading, time
        import torch, torchop
        from torchop._core.lock import registration_lock

        op = torchop.custom_op(
            "ended::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        x = torch.ones(2)
        op(x)
        op.register_fake(lambda x: x)
        registration_lock.acquire()
        threading.Thread(target=lambda: op(x), daemon=True).start()
        time.sleep(0.2)
        print("the end")
    """
    assert assert_clean(run_forked(program)) == "the end\n"


def test_python_ends_while_a_daemon_sleeps_that_opened_a_block():
    program = """
        import threading, time
        import torch, torchop

        op = torchop.custom_op(
            "ended::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op(torch.ones(2))
        opened = threading.Event()

        def sleep():
            with torchop.native.disabled():
                op(torch.ones(2))
            opened.set()
            while True:
                time.sleep(0.01)

        threading.Thread(target=sleep, daemon=True).start()
        assert opened.wait(60)
        print("the end")
    """
    assert assert_clean(run_forked(program)) == "the end\n"
