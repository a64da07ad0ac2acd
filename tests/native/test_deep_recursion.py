from __future__ import annotations

import sys

import pytest

from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_forked
from tests._support.free_threads import HAS_GIL, needs_greenlets

pytestmark = needs_native

PROGRAM = """
    import sys, threading
    import torch, torchop

    sys.setrecursionlimit(1_000_000)
    way = sys.argv[1]
    depth, limit = 0, 1

    def kernel(x: torch.Tensor) -> torch.Tensor:
        global depth
        depth += 1
        return again(x) if depth < limit else x.clone()

    op = torchop.custom_op("deep::op", kernel, mutates_args=())
    op.register_autograd(lambda ctx, grad: grad)
    library = torch.library.Library("deep", "FRAGMENT")
    library.define("theirs(Tensor x) -> Tensor")
    library.impl("theirs", kernel, "CPU")
    torchop.accelerate("deep::theirs")
    again = {
        "handle": op,
        "overload": torch.ops.deep.op.default,
        "dispatched": op,
        "theirs": torch.ops.deep.theirs,
    }[way]
    x = torch.ones(2, requires_grad=way == "overload")
    for _ in range(2):
        again(x)

    def call():
        global depth, limit
        depth, limit = 0, 1_000_000
        if way == "dispatched":
            torchop.native.disabled().__enter__()
        try:
            again(x)
        except RecursionError as error:
            print(depth, error)
        depth, limit = 0, 20
        assert again(x).tolist() == [1, 1]  # the operator still works afterwards

    for stack in (2**19, 2**26):
        threading.stack_size(stack)
        for run in range(2):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
    call()
    call()
"""


# Python 3.12 and 3.13 also limit the number of nested C calls, and programs cannot change that
# limit. In a thread with a large stack, the recursion reaches Python's limit before torchop's.
COUNTS_CALLS_OF_C = (3, 12) <= sys.version_info < (3, 14)


@pytest.mark.parametrize("way", ["handle", "overload", "theirs", "dispatched"])
def test_endless_recursion_of_a_kernel_raises(way):
    lines = [line.split(maxsplit=1) for line in assert_clean(run_forked(PROGRAM, way)).splitlines()]
    small, again, large, *rest = [int(depth) for depth, _ in lines]
    assert small > 50
    assert abs(small - again) < 10
    assert len(rest) == 3
    messages = [message for _, message in lines]
    of_python = messages[2:] if COUNTS_CALLS_OF_C else []
    assert large > (1 if of_python else 20) * small
    for message in messages[: len(messages) - len(of_python)]:
        assert "calling deep::" in message
        assert "the stack of this thread is full" in message
    for message in of_python:
        assert message.startswith("maximum recursion depth exceeded")


@needs_greenlets
def test_a_greenlet_has_the_stack_of_its_thread():
    if HAS_GIL:
        pytest.importorskip("greenlet")
    program = """
        import sys
        import greenlet, torch, torchop

        sys.setrecursionlimit(1_000_000)

        def kernel(x: torch.Tensor) -> torch.Tensor:
            return op(x) if is_prepared else x.clone()

        is_prepared = False
        op = torchop.custom_op("deep::op", kernel, mutates_args=())
        op(torch.ones(2))
        op(torch.ones(2))
        is_prepared = True

        def call():
            try:
                op(torch.ones(2))
            except RecursionError as error:
                print(str(error)[:15])

        for _ in range(3):
            greenlet.greenlet(call).switch()
    """
    assert assert_clean(run_forked(program)) == "maximum recursi\n" * 3
