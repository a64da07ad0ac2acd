"""Running a check: what it tells of an exception of the kernel, and of a crash."""

from __future__ import annotations

import torch
from torch import Tensor

import torchop
from tests.forking import run_forked
from torchop.testing import check


def test_failures_name_the_exception_of_the_kernel(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::picky", mutates_args=())
    def picky(x: Tensor) -> Tensor:
        return x.contiguous() + int(not x.is_contiguous())

    @picky.register_fake
    def _(x: Tensor) -> Tensor:
        raise KeyError("scale")

    names = ["subsystems.fake", "memory.transposed", "memory.given"]
    report = check(picky, (torch.ones(2, 3),), only=names, raise_exception=False)
    assert {result.check: result.cause for result in report.results} == {
        "memory.given": "",
        "memory.transposed": "",  # it raises nothing
        "subsystems.fake": "KeyError: 'scale'",
    }
    assert len(report.failures) == 2


def test_a_crash_names_its_check(namespace: str) -> None:
    outcome = run_forked(f"""
        import os, torch, torchop

        @torchop.custom_op("{namespace}::crash", mutates_args=())
        def crash(x: torch.Tensor) -> torch.Tensor:
            if not x.is_contiguous():
                os.abort()
            return x + 1

        torchop.testing.check(crash, (torch.ones(2, 3),), only="memory.*")
    """)
    assert outcome.returncode != 0
    assert f"in memory.transposed of {namespace}::crash" in outcome.stderr
