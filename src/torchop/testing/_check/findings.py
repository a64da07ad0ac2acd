"""Results of checks, and findings: the failures of one operator, grouped by their cause."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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


# Checks that compare results, and so fail too if a plain call is wrong already.
_COMPARE = (
    *("memory.*", "values.*", "sharing.*", "dtypes.numbers", "dtypes.half", "dtypes.double"),
    *("contracts.state", "contracts.num_threads", "contracts.defaults", "providers.*"),
    *("subsystems.threads", "subsystems.autocast", "subsystems.inference_mode"),
    *("subsystems.subclasses", "subsystems.vmap*", "subsystems.sharding"),
    *("subsystems.compiled", "subsystems.export_dynamic", "subsystems.residuals"),
)
_OF_FAKE = (
    *("dtypes.accepted", "dtypes.promotion", "subsystems.fake_symbols", "subsystems.fake_devices"),
    *("subsystems.compiled", "subsystems.export_dynamic", "subsystems.vmap_compiled"),
)
_OF_GRADIENTS = (
    *("subsystems.gradcheck", "subsystems.gradgradcheck", "subsystems.forward_mode"),
    *("subsystems.checkpoint", "subsystems.needs_input_grad", "subsystems.saved"),
    *("subsystems.grad_strides", "subsystems.determinism", "subsystems.func"),
    *("subsystems.threads", "contracts.leaks"),
)
# A failure of the first, on a plain call, makes the others fail too.
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "contracts.schema": (*_COMPARE, *_OF_GRADIENTS, "contracts.repeated"),
    "contracts.repeated": (*_COMPARE, *_OF_GRADIENTS),
    "contracts.state": (*_COMPARE, *_OF_GRADIENTS),
    "contracts.process": ("subsystems.threads", "contracts.num_threads"),
    "memory.given": _COMPARE,
    "memory.contiguous": _COMPARE,
    "memory.uninitialized": _COMPARE,
    "subsystems.fake": _OF_FAKE,
    "subsystems.fake_symbols": _OF_FAKE,
    "dtypes.accepted": ("dtypes.promotion",),
    "subsystems.needs_input_grad": ("subsystems.func",),
    "subsystems.autograd_registration": ("subsystems.compiled", "subsystems.vmap*"),
    "subsystems.determinism": _OF_GRADIENTS,
    "subsystems.gradcheck": (
        *("subsystems.gradgradcheck", "subsystems.forward_mode", "subsystems.func"),
        *("subsystems.needs_input_grad", "subsystems.compiled"),
    ),
    "subsystems.grad_strides": ("subsystems.gradgradcheck",),
    "subsystems.vmap": ("subsystems.vmap_compiled", "subsystems.func"),
    "providers.supports": ("providers.*",),
    "providers.agrees": ("providers.*", "memory.*"),
}


class Finding(NamedTuple):
    """One fault of an operator.

    Attributes:
        failure: the failure that names it best, with the program that shows it.
        others: the names of the checks that fail for the same cause.
    """

    failure: Result
    others: tuple[str, ...]


def grouped(failures: Sequence[Result]) -> tuple[Finding, ...]:
    """Return the findings: failures in the order of the table, each with those that it explains."""
    groups: list[list[Result]] = []
    for failure in failures:
        group = next((g for g in groups if any(_explains(one, failure) for one in g)), None)
        if group is None:
            groups.append([failure])
        else:
            group.append(failure)
    return tuple(Finding(g[0], tuple(other.check for other in g[1:])) for g in groups)


def _explains(one: Result, other: Result) -> bool:
    """Whether two failures have one cause, of which `one` is the clearer."""
    if one.cause and one.cause == other.cause:
        return True
    if one.provider != other.provider:
        return False
    first, second = (result.check.partition("[")[0] for result in (one, other))
    if one.group in ("plain", "gradient") or first == "memory.contiguous":
        patterns = _EXPLAINS.get(first, ())
        return any(fnmatch.fnmatchcase(second, pattern) for pattern in patterns)
    # A kernel that ignores strides also fails for arguments that share memory. In the same
    # variants, a fault shows in results, or only in the fake kernel.
    same = (one.group, other.group) == ("layout", "sharing") or one.group == other.group
    return same and _is_of_fake(first) is _is_of_fake(second)


def _is_of_fake(check: str) -> bool:
    return check == "subsystems.fake" or check in _OF_FAKE
