"""A kernel that calls its operator without end raises RecursionError, whatever Python's limit."""

from __future__ import annotations

import pytest

from tests.forking import run_forked
from tests.support import assert_clean, needs_native

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
            assert "stack of this thread is full" in str(error), error
            assert "deep::" in str(error), error
            print(depth)
        depth, limit = 0, 20
        assert again(x).tolist() == [1, 1]  # what is left afterwards is whole

    for stack in (2**20, 2**26):
        threading.stack_size(stack)
        for run in range(2):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
    call()
    call()
"""


@pytest.mark.parametrize("way", ["handle", "overload", "theirs", "dispatched"])
def test_a_kernel_that_calls_itself_without_end_is_told(way):
    depths = [*map(int, assert_clean(run_forked(PROGRAM, way)).split())]
    small, again, large, *_ = depths
    assert small > 50
    assert abs(small - again) < 10
    assert large > 20 * small
    assert len(depths) == 6


def test_a_greenlet_has_the_stack_of_its_thread():
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
