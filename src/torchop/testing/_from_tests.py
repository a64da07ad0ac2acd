"""Check operators in worker processes, using the calls of a test suite as examples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchop._compat import fake_tensors, operators
from torchop.extend import Operator, OpName
from torchop.testing._check.advice import finding_in_words, followup_in_words
from torchop.testing._check.calls import Example
from torchop.testing._check.findings import Finding, Result
from torchop.testing._check.report import CheckReport
from torchop.testing._check.run import Check, is_named, nearest_check, plan_checks
from torchop.testing._check.table import CHECKS
from torchop.testing._fork import WorkerError
from torchop.testing._suite_calls import StoredCall, examples_of, grown, has_rows
from torchop.testing._worker import CheckWorker

# The time limit of one check in seconds. It is much larger than the budget of an operator, because
# a check that exceeds this limit fails, whereas checks that do not fit into the budget are only
# skipped.
_LONGEST = 60.0
_MOST_ELAPSED = 4
# The check that fails if the checks of an operator cannot be planned.
_NO_PLAN = "contracts.examples"
# These checks find most bugs, so they run first, in case the budget is too small for all checks.
_FIRST = (
    "contracts.schema",
    "memory.given",
    "memory.transposed",
    "memory.gaps",
    "subsystems.fake",
    "subsystems.gradcheck",
    "subsystems.saved",
    "subsystems.grad_memory",
    "memory",
    "dtypes",
    "contracts.repeated",
    "contracts.environment",
)
_LAST = (
    "subsystems.threads",
    "contracts.num_threads",
    "contracts.leaks",
    "memory.blocks",
    "subsystems.compiled",
    "subsystems.vmap_compiled",
    "subsystems.export_dynamic",
)


class Family(NamedTuple):
    """The results of one family of checks, such as `"memory"`, for one operator.

    `findings` contains the findings of all families, because a failure in one family may explain
    failures in other families.
    """

    op: str
    name: str
    report: CheckReport
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Result, ...]:
        return self.report.failures

    @property
    def is_skipped(self) -> bool:
        """Whether no check of the family either passed or failed."""
        return not self.report.count("passed") and not self.failures

    @property
    def expected(self) -> tuple[Result, ...]:
        return tuple(r for r in self.report.results if r.outcome == "expected failure")

    def in_words(self) -> str:
        operator, texts = Operator(self.op, "check"), []
        for finding in self.findings:
            if finding.failure.family == self.name:
                texts.append(finding_in_words(operator, finding))
                continue
            here = [r for r in self.failures if r.check in finding.others]
            texts += [followup_in_words(operator, r, finding.failure) for r in here]
        return "\n\n".join(texts)

    def tested(self) -> dict[str, Any]:
        """Return the outcome as plain values, which pytest-xdist can send to the controller."""
        outcome, text = "passed", ""
        if self.failures:
            outcome, text = "failed", self.in_words()
        elif self.expected:
            outcome, text = "xfailed", "; ".join(r.message for r in self.expected)[:1000]
        elif self.is_skipped:
            outcome, text = "skipped", self.why_skipped()
        return {
            "name": f"{self.op}[{self.name}]",
            "outcome": outcome,
            "text": text,
            "seconds": sum(result.seconds for result in self.report.results),
            "torchop": json.dumps(self.report.to_dict(), default=str),
        }

    def why_skipped(self) -> str:
        reasons = {r.check: r.message for r in self.report.results}
        return "; ".join(f"{check}: {why}" for check, why in reasons.items())[:1000]


class Baseline:
    """Known failures, in a JSON file that maps operators to checks and their messages.

    If the file does not exist yet, no failure is known, and `save` writes the file. The first run
    reports all failures, because otherwise a misspelled path would accept all of them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.is_new = path is not None and not path.exists()
        self._known: dict[str, dict[str, str]] = {}
        self._failed: dict[str, dict[str, str]] = {}
        if path is not None and not self.is_new:
            self._known = json.loads(path.read_text(encoding="utf-8"))
            is_right = isinstance(self._known, dict) and all(
                isinstance(checks, dict) for checks in self._known.values()
            )
            if not is_right:
                raise ValueError(
                    "a baseline maps operators to objects, which map checks to messages. Delete "
                    "the file, and the next run writes it."
                )
            names = {_NO_PLAN, *(kind.name for kind in CHECKS)}
            for op, check in self._entries():
                # Only the name of a provider, in brackets, depends on the operator.
                if check.partition("[")[0] not in names:
                    problem = f"no check has this full name.{nearest_check(check)}"
                    raise ValueError(f"the entry {check!r} of {op}: {problem}")

    def _entries(self) -> Iterator[tuple[str, str]]:
        return ((op, check) for op, checks in self._known.items() for check in checks)

    def applied(self, op: str, result: Result) -> Result:
        if result.outcome != "failed":
            return result
        self._failed.setdefault(op, {})[result.check] = result.message.partition("\n")[0]
        if self._path is None or result.check not in self._known.get(op, {}):
            return result
        message = f"in {self._path.name}: {result.message}"
        return dataclasses.replace(result, outcome="expected failure", message=message)

    def fixed(self, reports: Sequence[CheckReport]) -> list[str]:
        """Return the known failures whose checks now pass."""
        passed = {(r.op, each.check) for r in reports for each in r.results if _passed(each)}
        return [f"{op}: {check}" for op, check in self._entries() if (op, check) in passed]

    def save(self) -> None:
        if self.is_new and self._path is not None:
            text = json.dumps(self._failed, indent=1, sort_keys=True) + "\n"
            self._path.write_text(text, encoding="utf-8")


def _passed(result: Result) -> bool:
    return result.outcome == "passed"


def check_calls(
    calls: Mapping[str, Sequence[StoredCall]],
    *,
    only: Sequence[str] = (),
    budget: float = 5.0,
    baseline: Baseline | None = None,
) -> Iterator[CheckReport]:
    """Yield a report for each operator that was called.

    Args:
        calls: the recorded calls of each operator.
        only: names, families or patterns of checks.
        budget: the limit on the CPU time for the checks of each operator, in seconds.
        baseline: known failures.
    """
    baseline = baseline or Baseline(None)
    with fake_tensors.new_fake_mode():  # import its modules once, not in each worker process
        pass
    for op in sorted(calls):
        started = time.perf_counter()
        name = OpName.parse(op)
        if not operators.is_registered(name.packet, name.overload):
            continue  # a test defined the operator and deregistered it again
        results = [baseline.applied(op, each) for each in _results(op, calls[op], only, budget)]
        if results:
            schema = str(Operator(op, "check").schema)
            seconds = time.perf_counter() - started
            yield CheckReport(op, schema, tuple(results), 0, seconds, allow_not_run=True)


def families(report: CheckReport) -> list[Family]:
    names = dict.fromkeys(result.family for result in report.results)
    return [
        Family(
            report.op,
            name,
            dataclasses.replace(
                report, results=tuple(r for r in report.results if r.family == name)
            ),
            report.findings,
        )
        for name in names
    ]


def _results(
    op: str, calls: Sequence[StoredCall], only: Sequence[str], budget: float
) -> Iterator[Result]:
    examples = examples_of(calls)
    # First try with enlarged examples. If an enlarged example crashes the kernel, start over with
    # only the calls of the test suite.
    for may_grow in (True, False):
        plan = functools.partial(_plan, op, examples, tuple(only), may_grow)
        worker = CheckWorker(plan)
        try:
            names = worker.names(_LONGEST)
        except WorkerError as error:
            worker.close()
            problem = str(error)
            continue
        try:
            # The budget limits the CPU time. On a busy machine, the same work takes more wall-clock
            # time, so the limit on wall-clock time is larger.
            end = time.perf_counter() + _MOST_ELAPSED * budget
            for name in sorted(names, key=_turn):
                if worker.seconds > budget or time.perf_counter() > end:
                    message = f"the budget of {budget:g} s ended before this check"
                    yield Result(name, "not run", message)
                else:
                    yield worker.run(name, _LONGEST + _MOST_ELAPSED * budget, end)
        finally:
            worker.close()
        return
    yield Result(_NO_PLAN, "failed", f"the checks cannot be planned: {problem}")


def _turn(check: str) -> int:
    for index, pattern in enumerate(_LAST):
        if is_named(check, pattern):
            return 100 + index
    places = (index for index, pattern in enumerate(_FIRST) if is_named(check, pattern))
    return next(places, 50)


def _plan(
    op: str, examples: Sequence[Any], only: Sequence[str], may_grow: bool
) -> Mapping[str, Check]:
    if may_grow:
        examples = _with_grown(op, examples)
    checks = plan_checks(op, examples)
    chosen = [c for c in checks if not only or any(map(c.is_named, only))]
    return {check.name: check for check in chosen}


def _with_grown(op: str, examples: Sequence[Any]) -> list[Any]:
    """Add an enlarged example with rows and columns, unless an accepted example has both."""
    subject = plan_checks(op, examples)[0].subject
    accepted = [e for e in subject.originals if subject.refusal(e) is None]
    if any(has_rows(tuple(example)) for example in accepted):
        return list(examples)
    for example in accepted:
        for rows in (0, 3):
            other = Example(*grown(tuple(example), rows=rows))
            with contextlib.suppress(Exception):
                is_right = subject.refusal(other) is None and subject.has_fake_sizes(other)
                if is_right and has_rows(tuple(other)):
                    return [examples[0], tuple(other), *examples[1:]]
    return list(examples)


def names_check(pattern: str) -> bool:
    """Return whether a pattern matches the name of at least one check."""
    return any(is_named(kind.name, pattern) for kind in CHECKS)
