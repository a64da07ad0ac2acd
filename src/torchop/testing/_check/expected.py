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
    """That a check fails.

    Attributes:
        name: what is expected to fail: a check, its last part, or a family, of which one has to.
        reason: why.
    """

    name: str
    reason: str

    def is_of_one(self, check: str) -> bool:
        """Whether it is about this check alone."""
        return self.name in (check, check.partition(".")[2])

    @property
    def unmet(self) -> str:
        """What is said if it passes."""
        return f"it was expected to fail ({self.reason}), and passes. Take it out of expected."


def expected_for(op: str, expected: Mapping[str, Any]) -> Mapping[str, str] | None:
    """What is expected of one operator, where reasons may be by operator: `{"mylib::*": {...}}`."""
    if not any("::" in name for name in expected):
        return expected  # the same for all of them
    by_operator: Mapping[str, Mapping[str, str]] = expected
    return operator_patterns.value_for(OpName.parse(op), by_operator)


def as_expected(result: Result, expected: Expectation | None) -> Result:
    """The result of a check that may have been expected to fail."""
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
    """A failure for each name of several checks that were expected to fail, if all pass."""
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
