"""Results of checks, and findings, which group failures that have the same cause."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Outcome = Literal["passed", "failed", "expected failure", "cannot be done", "not run"]

# The start of a sentence in error messages, used if results are wrong even for contiguous tensors.
NOT_THE_LAYOUT = "The layout is not the cause"


@dataclass(frozen=True)
class Result:
    """The outcome of one check of an operator.

    Attributes:
        check: the name of the check.
        outcome: `"passed"`, `"failed"`, `"expected failure"`, `"cannot be done"` or `"not run"`.
        message: the failure, or the reason why the check cannot be done or did not run.
        program: a program that raises the same error, if the check failed.
        question: the question that the check answers, such as "Do 200 calls leak nothing?".
        seconds: the duration of the check.
        cases: the number of variants that were tried.
        refused: the number of variants that the operator rejected by raising an exception.
        details: further results, such as a table of dtypes.
        cause: a description of the kernel's exception, or of the crash of the process, that caused
            the failure; an empty string for other failures.
        rejected: the number of variants that `valid` of `register_examples` rejected.
        group: the group of the variant that failed, such as `"layout"`.
        changes: the differences between the arguments of the failing call and the examples, such
            as `"layout"`, `"torch.float64"` or `"size 0"`.

    Example:
        >>> import torch, torchop
        >>> report = torchop.testing.check("aten::sin", (torch.ones(2),), only=["given", "gaps"])
        >>> report.results[0].check, report.results[0].outcome
        ('memory.given', 'passed')
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
    changes: tuple[str, ...] = ()

    @property
    def crashes(self) -> bool:
        """Whether the failing call ended the process, or exceeded the time limit."""
        return self.cause.startswith("the call ")

    @property
    def family(self) -> str:
        """The family of the check, i.e. the first part of the name, such as `"memory"`."""
        return self.check.partition(".")[0]

    @property
    def provider(self) -> str:
        """The provider whose kernel was checked; an empty string for the reference kernel."""
        return self.check.partition("[")[2].rstrip("]")


# The checks that compare results. If an operator returns incorrect results even for the original
# examples, all of these checks fail.
_COMPARE = (
    *("memory.*", "values.*", "sharing.*", "dtypes.numbers", "dtypes.half", "dtypes.double"),
    *("contracts.state", "contracts.num_threads", "contracts.defaults", "providers.*"),
    *("subsystems.threads", "subsystems.autocast", "subsystems.inference_mode"),
    *("subsystems.subclasses", "subsystems.vmap*", "subsystems.sharding"),
    *("subsystems.compiled*", "subsystems.export_dynamic", "subsystems.residuals"),
)
_OF_COMPILERS = ("subsystems.compiled*", "subsystems.export_dynamic", "subsystems.vmap_compiled")
_OF_FAKE = (
    *("dtypes.accepted", "dtypes.promotion", "subsystems.fake_symbols", "subsystems.fake_devices"),
    *_OF_COMPILERS,
)
_OF_GRADIENTS = (
    *("subsystems.gradcheck", "subsystems.gradgradcheck", "subsystems.forward_mode"),
    *("subsystems.needs_input_grad", "subsystems.saved", "subsystems.grad_strides"),
    "subsystems.func",
    *("subsystems.threads", "contracts.leaks"),
)
# Maps a check to the checks whose failures it explains: if the first check fails even for the
# unmodified example, failures of the checks in the tuple probably have the same cause. Some keys
# also name the kind of failure (see `_key`).
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "contracts.schema": (*_COMPARE, *_OF_GRADIENTS, "contracts.repeated"),
    "contracts.schema: write": (*_OF_GRADIENTS, "sharing.*", "subsystems.vmap*"),
    "contracts.repeated": (*_COMPARE, *_OF_GRADIENTS),
    "contracts.state": (*_COMPARE, *_OF_GRADIENTS),
    "contracts.process": ("subsystems.threads", "contracts.num_threads"),
    "memory.given": _COMPARE,
    "memory.contiguous": _COMPARE,
    "memory.uninitialized": (*_COMPARE, *_OF_GRADIENTS, "contracts.repeated"),
    "subsystems.fake": _OF_FAKE,
    "subsystems.fake_symbols": _OF_FAKE,
    "dtypes.accepted": ("dtypes.promotion",),
    "dtypes.double": ("dtypes.float_arguments",),
    "subsystems.needs_input_grad": ("subsystems.func",),
    "subsystems.autograd_registration": ("subsystems.compiled", "subsystems.vmap*"),
    "subsystems.gradcheck": (
        *("subsystems.gradgradcheck", "subsystems.forward_mode", "subsystems.func"),
        *("subsystems.needs_input_grad", "subsystems.grad_memory", "subsystems.compiled"),
    ),
    "subsystems.grad_strides": ("subsystems.gradgradcheck",),
    "subsystems.saved: incoming": _OF_GRADIENTS,
    "subsystems.saved": ("subsystems.gradgradcheck", "subsystems.func"),
    "subsystems.compiled": ("subsystems.compiled_autocast",),
    "subsystems.vmap": ("subsystems.vmap_compiled", "subsystems.func"),
    "providers.supports": ("providers.*",),
    "providers.agrees": ("providers.*", "memory.*"),
}


class Finding(NamedTuple):
    """One bug of an operator, with all failures that it causes.

    `failure` is the failure that shows the bug most clearly. `others` contains the names of the
    other checks that fail because of the same bug.
    """

    failure: Result
    others: tuple[str, ...]


def grouped(failures: Sequence[Result]) -> tuple[Finding, ...]:
    """Group failures that have the same cause, with the clearest failure of each group first.

    Failures of `dtypes.accepted` and `dtypes.promotion` come last, because they may concern dtypes
    that the author's examples do not use.
    """

    def order(failure: Result) -> tuple[bool, int]:
        return any(_fails_in_the_same_case(one, failure) for one in failures), _clarity(failure)

    groups: list[list[Result]] = []
    for failure in sorted(failures, key=order):
        group = next((g for g in groups if any(_explains(one, failure) for one in g)), None)
        if group is None:
            groups.append([failure])
        else:
            group.append(failure)
    return tuple(Finding(g[0], tuple(other.check for other in g[1:])) for g in groups)


def explaining(failure: Result, earlier: Sequence[Result]) -> Result | None:
    """Return the first `earlier` failure that probably has the same cause, or None."""
    return next((one for one in earlier if _explains(one, failure)), None)


def _clarity(failure: Result) -> int:
    """Return a sort key that puts the failures with the most obvious cause first."""
    check = failure.check.partition("[")[0]
    if check in ("memory.uninitialized", "subsystems.saved"):
        return 0
    # Several checks crash if the kernel crashes for some size or layout. The "memory" checks are
    # named after the size or layout.
    if failure.crashes and failure.group != "plain" and failure.family != "memory":
        return 2
    return 2 if check in ("dtypes.accepted", "dtypes.promotion") else 1


def _key(failure: Result) -> str:
    check = failure.check.partition("[")[0]
    if check == "contracts.schema" and "UndeclaredMutationError" in failure.message:
        # The other checks pass fresh copies of the arguments to each call. So an undeclared write
        # does not affect the results that they compare, unless the call swaps the storage of an
        # argument.
        return check if "swapped" in failure.message else f"{check}: write"
    if check == "subsystems.saved" and failure.group == "incoming":
        return f"{check}: incoming"
    return check


def _explains(one: Result, other: Result) -> bool:
    """Return whether both failures have the same cause, and `one` shows the cause more clearly."""
    if one.cause and one.cause == other.cause:
        return True
    if one.provider != other.provider:
        return False
    if _fails_in_the_same_case(one, other):
        return True
    first, second = (result.check.partition("[")[0] for result in (one, other))
    is_plain = one.group in ("plain", "gradient", "incoming") or first == "memory.contiguous"
    if is_plain or first == "dtypes.double":
        return _is_named(second, _EXPLAINS.get(_key(one), ()))
    # Compilers call the fake kernel with other sizes and strides too. So a fake kernel that is
    # wrong for any of them probably explains why a compiled program fails.
    if first == "subsystems.fake" and _is_named(second, _OF_COMPILERS):
        return True
    # A kernel that ignores strides fails for other layouts, and also for arguments that share
    # memory, so treat failures in these two groups as one bug. A bug in the fake kernel and
    # incorrect results of the real kernel are always different bugs.
    same = (one.group, other.group) == ("layout", "sharing") or one.group == other.group
    return same and _is_of_fake(first) is _is_of_fake(second)


def _fails_in_the_same_case(one: Result, other: Result) -> bool:
    """Return whether `other` fails for a layout, dtype or size in which the kernel itself fails.

    The checks of gradients and subsystems call the kernel too, so the kernel's failure `one`
    explains such a failure. If the examples themselves have the layout, dtype or size, it is not
    listed in `changes`, and `_EXPLAINS` applies.
    """
    is_of_kernel = one.family == "memory" or one.check.startswith("contracts.schema")
    if not is_of_kernel or other.family != "subsystems" or one.provider != other.provider:
        return False
    if _is_of_fake(other.check.partition("[")[0]):
        return False
    kinds = {"layout": ("layout",), "size": ("size ",), "dtype": ("torch.",)}
    shared = set(one.changes) & set(other.changes)
    return any(change.startswith(kinds.get(one.group, ())) for change in shared)


def _is_named(check: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(check, pattern) for pattern in patterns)


def _is_of_fake(check: str) -> bool:
    return check == "subsystems.fake" or _is_named(check, _OF_FAKE)
