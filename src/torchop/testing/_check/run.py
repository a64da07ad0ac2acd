"""Planning checks, and running one."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchop._core.registry import OpLike
from torchop._errors import short_repr
from torchop.testing._check import contracts, dtypes, memory, program, sharing, values
from torchop.testing._check.kinds import CheckKind, Details
from torchop.testing._check.report import Outcome, Result
from torchop.testing._check.shrink import shrunk
from torchop.testing._check.subject import (
    CannotCheck,
    Case,
    Subject,
    reason,
    same_random_state,
)
from torchop.testing._check.subsystems import compilers, gradients, surroundings, transforms

_LONGEST_MESSAGE = 1200


def kinds() -> tuple[CheckKind, ...]:
    """All checks there are, the cheap ones first."""
    every = (
        *memory.CHECKS,
        *dtypes.CHECKS,
        *values.CHECKS,
        *sharing.CHECKS,
        *contracts.CHECKS,
        *gradients.CHECKS,
        *transforms.CHECKS,
        *surroundings.CHECKS,
        *compilers.CHECKS,
    )
    return tuple(sorted(every, key=lambda kind: kind.is_costly))


@dataclass(frozen=True)
class Check:
    """One check of one operator, which has not run.

    Attributes:
        op: the name of the operator.
        name: the name of the check, such as `"memory.transposed"`.
        question: what it answers.
        expected: why it is expected to fail; None if it is not.
        expected_by: the name by which it is expected to, which may be that of a family: of a
            family, one check has to fail.
        subject: the operator with its examples.
        kind: what is checked.
    """

    op: str
    name: str
    question: str
    expected: str | None
    expected_by: str | None
    subject: Subject
    kind: CheckKind


def plan_checks(
    op: OpLike,
    examples: Sequence[Any] = (),
    *,
    reference: Callable[..., Any] | None = None,
    seed: int = 0,
    expected: Mapping[str, str] | None = None,
    only: str | Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> list[Check]:
    """The checks of an operator, each of which `run_check` runs; the arguments are `check`'s."""
    subject = Subject(op, examples, reference=reference, seed=seed, rtol=rtol, atol=atol)
    patterns = (only,) if isinstance(only, str) else only
    chosen = [kind for kind in kinds() if _is_chosen(kind, patterns)]
    if not chosen:
        raise ValueError(
            f"check({subject}, only={short_repr(only)}): no check has such a name; the families "
            f"are {', '.join(dict.fromkeys(kind.family for kind in kinds()))}."
        )
    reasons = dict(expected or {})
    for name in reasons:
        if not any(_is_named(kind.name, name) for kind in kinds()):
            raise ValueError(
                f"check({subject}, expected=...): no check is called {short_repr(name)}. Give the "
                "name of a check, its last part, or a family: 'memory.transposed', 'transposed'."
            )
    checks = []
    for kind in chosen:
        by = next((name for name in reasons if _is_named(kind.name, name)), None)
        why = None if by is None else reasons[by]
        checks.append(Check(subject.name, kind.name, kind.question, why, by, subject, kind))
    return checks


def _is_chosen(kind: CheckKind, patterns: Sequence[str] | None) -> bool:
    if patterns is None:
        return not kind.on_request
    if kind.on_request:
        return kind.name in patterns
    return any(_is_named(kind.name, pattern) for pattern in patterns)


def _is_named(check: str, name: str) -> bool:
    family, _, last = check.partition(".")
    return name in (family, last) or fnmatch.fnmatchcase(check, name)


def run_check(check: Check, *, end: float | None = None) -> Result:
    """Runs one check. It raises nothing: what goes wrong is in the result.

    Args:
        check: one of `plan_checks`.
        end: when to stop, on the clock of `time.perf_counter`; a check that has not answered by
            then was not run.
    """
    started = time.perf_counter()
    run = _Run(check, end)
    try:
        with warnings.catch_warnings(), _unlogged(), same_random_state():
            warnings.simplefilter("ignore")  # of calls made to see whether they are refused
            outcome, message, text = run.outcome()
    except CannotCheck as error:
        outcome, message, text = "cannot be done", str(error), ""
    except _OutOfTime:
        outcome, message, text = "not run", f"the budget ended after {run.cases} cases", ""
    if check.expected is not None:
        if outcome == "failed":
            outcome, message, text = "expected failure", f"{check.expected} ({message})", text
        elif outcome == "passed" and check.expected_by in (check.name, check.name.split(".")[1]):
            outcome, message = "failed", unexpected(check.expected)
    return Result(
        check.name,
        outcome,
        _cut(message),
        text,
        check.question,
        time.perf_counter() - started,
        run.cases,
        run.refused,
        run.details,
    )


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps PyTorch from logging what its checks are about to raise."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def unexpected(why: str) -> str:
    """What is said of a check that was expected to fail, and passes."""
    return f"it was expected to fail ({why}), and passes. Take it out of expected."


class _OutOfTime(Exception):  # noqa: N818  (not an error)
    """The budget ended."""


class _Run:
    """The cases of one check, one after the other, up to the first that fails."""

    def __init__(self, check: Check, end: float | None) -> None:
        self.check, self.end = check, end
        self.subject = check.subject
        self.cases = self.refused = 0
        self.details: Details = {}

    def outcome(self) -> tuple[Outcome, str, str]:
        refusals: dict[str, str] = {}
        for case in self._each():
            self.cases += 1
            try:
                example, _ = case.arguments()
                refusal = self.subject.refusal(example) if case.calls else None
                if refusal is not None:
                    self.refused += 1
                    refusals.setdefault(case.label, reason(refusal))
                    continue
            except CannotCheck as error:
                self.refused += 1
                refusals.setdefault(case.label, str(error))
                continue
            failure = self.failure(case)
            if isinstance(failure, NotImplementedError):  # refused, only later than by the call
                self.refused += 1
                refusals.setdefault(case.label, reason(failure))
            elif failure is not None:
                return self._failed(case, failure)
        if self.cases == self.refused:
            first = next(iter(refusals.items()), None)
            raise CannotCheck(
                "there is nothing to try" if first is None else f"{first[1]} ({first[0]})"
            )
        if refusals:
            self.details["refused by the operator"] = refusals
        return "passed", "", ""

    def _each(self) -> Iterator[Case]:
        cases = self.check.kind.cases(self.subject, self.details)
        while True:
            if self.end is not None and time.perf_counter() > self.end:
                raise _OutOfTime
            try:
                case = next(cases, None)
            except CannotCheck:
                if self.cases:
                    return
                raise
            if case is None:
                return
            yield case

    def failure(self, case: Case) -> Exception | None:
        """What the probe raises; None where it cannot be asked."""
        try:
            example, options = case.arguments()
            if case.calls and self.subject.refusal(example) is not None:
                return None
        except Exception:
            return None
        try:
            case.probe(self.subject.op, *example, **options)
        except CannotCheck:
            raise
        except Exception as error:
            return error
        return None

    def _failed(self, case: Case, error: Exception) -> tuple[Outcome, str, str]:
        if case.shrink:
            seconds = 3.0 if self.end is None else min(3.0, self.end - time.perf_counter())
            case = shrunk(case, self.failure, seconds)
            error = self.failure(case) or error
        message = f"{case.label}: {type(error).__name__}: {_cut(str(error).strip())}"
        if isinstance(error, AssertionError):
            message = _cut(str(error).strip())
            if not message.startswith(case.label):
                message = f"{case.label}: {message}"
        example, options = case.arguments()
        comment = f"{self.check.name} of {self.subject}: {message}"
        text = program.write(
            self.subject.op, case.probe, example.args, example.kwargs, options, comment
        )
        return "failed", message, text


def _cut(message: str) -> str:
    if len(message) <= _LONGEST_MESSAGE:
        return message
    half = _LONGEST_MESSAGE // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"
