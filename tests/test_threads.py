"""The stress test of tools/threads.py, for a moment; `make threads` runs it for longer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.forking import run_forked
from tests.support import assert_clean, load_tool, needs_native


@needs_native
def test_threads_call_operators_that_others_change() -> None:
    """In a process of its own, because the failure may be the end of it."""
    done = run_forked(
        """
        import torchop, warnings
        from tests.support import load_tool

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
    wrong = SimpleNamespace(custom_op=lambda *_, **__: lambda x: x - 5)
    with pytest.raises(RuntimeError, match="a call returned"):
        threads.run("redefined", wrong, 4, 0.5)
    assert threads.check(torch.ones(2)) == "result"
