"""Families in programs of ExecuTorch, which calls the form with out= of every operator."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support import run_program

LOWER = """
    import torch
    from executorch.exir import to_edge
    from executorch.exir._serialize._program import deserialize_pte_binary
    from tests.define.families import bounds, sine

    sin, limits = sine("lowered"), bounds("lowered")

    class Model(torch.nn.Module):
        def forward(self, x):
            low, high = limits(sin(x) + 1, scale=2)
            return low * 2, high

    x = torch.randn(3, 4)
    program = to_edge(torch.export.export(Model(), (x,))).to_executorch()
    contents = deserialize_pte_binary(program.buffer).program
    (plan,) = contents.execution_plan
    print(sorted(f"{op.name}.{op.overload}" for op in plan.operators if "lowered" in op.name))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None,
    reason="executorch is not installed: `make executorch` does that, and runs this test",
)
def test_a_program_is_lowered_to_a_file_that_calls_the_form_with_out() -> None:
    # Not on silence: executorch warns, and writes, of packages that it does without.
    done = run_program(LOWER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['lowered::bounds.out', 'lowered::sin.out']"
