"""A short run of the stress test tools/threads.py. `nox -s threads` runs it for longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchop
from tests._support.common import assert_clean, load_tool, needs_native
from tests._support.forking import run_forked

pytestmark = pytest.mark.project


@needs_native
def test_threads_call_operators_that_other_threads_change() -> None:
    """Run the stress test in another process, because a bug may crash the process."""
    done = run_forked(
        """
        import torchop, warnings
        from tests._support.common import load_tool

        warnings.simplefilter("ignore")
        torchop.native.wait()
        threads = load_tool("threads")
        for name in threads.SCENARIOS:
            counts = threads.run(name, torchop, 16, 0.7)
            print(name, counts["result"] > 0, len(counts) > 1)
        """
    )
    lines = assert_clean(done).splitlines()
    assert lines == [f"{name} True True" for name in load_tool("threads").SCENARIOS]


def test_wrong_result_is_a_failure() -> None:
    threads = load_tool("threads")

    def wrong_op(name: str, body: Any, **more: Any) -> Any:
        return torchop.custom_op(name, lambda x: x - 5, schema="(Tensor x) -> Tensor", **more)

    wrong = SimpleNamespace(custom_op=wrong_op)
    with pytest.raises(RuntimeError, match="a call returned"):
        threads.run("redefined", wrong, 4, 0.5)
    assert threads.check(torch.ones(2)) == "result"


def test_only_overlapping_batches_are_counted() -> None:
    threads = load_tool("threads")

    def batches(*times: tuple[int, int, int]) -> list[Any]:
        return [threads.Batch(*(10_000 * time for time in each)) for each in times]

    own = batches((0, 2, 2), (2, 4, 2), (4, 9, 2), (9, 11, 2), (11, 13, 2))
    other = batches((1, 3, 2), (3, 8, 5), (8, 12, 4), (12, 20, 1))
    assert threads.at_once(own, []) == [20_000] * 4  # leaves out the interrupted batch
    assert threads.at_once(own, [other]) == [20_000] * 2
    assert threads.at_once(own, [other, batches((0, 5, 5))]) == [20_000]
    assert threads.at_once(own, [other, []]) == []
    assert threads.pace(torchop, 1, 0.1) > 0
