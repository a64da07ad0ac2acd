"""The outcome of one check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "expected failure", "cannot be done", "not run"]


@dataclass(frozen=True)
class Result:
    """The outcome of one check of an operator.

    Attributes:
        check: the name of the check.
        outcome: `"passed"`, `"failed"`, `"expected failure"`, `"cannot be done"` or `"not run"`.
        message: what failed, with the smallest example found; or why it cannot be done or was not
            run.
        program: a program that raises the same error, if the check failed; empty for a check that
            was expected to fail and passes.
        question: what the check answers.
        seconds: how long it took.
        cases: how many variants were tried.
        refused: how many of these the operator refused with an exception.
        details: more results of the check, such as a table of dtypes.
        cause: the exception of the kernel behind a failure, or the end of the process; empty if it
            is neither.
        rejected: how many variants were not tried, because `valid` of `register_examples` rejects
            them.
        group: the group of variants in which it failed, such as `"layout"`.

    Example:
        >>> import torch, torchop
        >>> report = torchop.testing.check("aten::sin", (torch.ones(2),), only="memory.transposed")
        >>> report.results[0].outcome, report.results[0].message
        ('cannot be done', 'no tensor has two dimensions')
    """

    check: str
    outcome: Outcome
    message: str = ""
    program: str = ""
    question: str = ""
    seconds: float = 0.0
    cases: int = 0
    refused: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    rejected: int = 0
    group: str = ""

    @property
    def family(self) -> str:
        """The family of the check: memory, dtypes, values, sharing, subsystems, contracts."""
        return self.check.partition(".")[0]

    @property
    def provider(self) -> str:
        """The provider whose kernel was checked; empty for the reference."""
        return self.check.partition("[")[2].rstrip("]")
