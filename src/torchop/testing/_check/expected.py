"""Checks that are expected to fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchop._accelerate import patterns as operator_patterns
from torchop.extend import OpName
from torchop.testing._check.findings import Result

_LONGEST_MESSAGE = 1200


class Expectation(NamedTuple):
    """An expected failure.

    Attributes:
        name: a check, the last part of its name, or a family, of which one check must fail.
        reason: the reason, for the report.
    """

    name: str
    reason: str

    def is_of_one(self, check: str) -> bool:
        """Return whether the name is that of this check, and not of a family."""
        return self.name in (check, check.partition(".")[2])

    @property
    def unmet(self) -> str:
        """The message for a check that passes."""
        return f"it was expected to fail ({self.reason}), and passes. Take it out of expected."


def expected_for(op: str, expected: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the expected failures of one operator; keys may be patterns: `{"mylib::*": {...}}`."""
    if not any("::" in name for name in expected):
        return expected  # for all operators
    by_operator: Mapping[str, Mapping[str, str]] = expected
    return operator_patterns.value_for(OpName.parse(op), by_operator)


def as_expected(result: Result, expected: Expectation | None) -> Result:
    """Convert an expected failure, or an unexpected pass, to its outcome."""
    if expected is None:
        return result
    if result.outcome == "failed":
        message = cut(f"{expected.reason} ({result.message})")
        return dataclasses.replace(result, outcome="expected failure", message=message)
    if result.outcome == "passed" and expected.is_of_one(result.check):
        return dataclasses.replace(result, outcome="failed", message=expected.unmet)
    return result


def unmet(
    expected: Mapping[str, Expectation | None], results: Sequence[Result]
) -> Iterator[Result]:
    """Yield a failure for each expected family none of whose checks failed."""
    outcomes = {result.check: result.outcome for result in results}
    for expectation in dict.fromkeys(filter(None, expected.values())):
        together = {outcomes.get(name) for name, each in expected.items() if each == expectation}
        if together <= {"passed", "cannot be done"} and "passed" in together:
            yield Result(expectation.name, "failed", expectation.unmet)


def cut(message: str) -> str:
    if len(message) <= _LONGEST_MESSAGE:
        return message
    half = _LONGEST_MESSAGE // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"
