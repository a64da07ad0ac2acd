"""The kinds of checks: a name, a question, and the cases that answer it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from torchop.testing._check.subject import Case, Subject

# What a check tells beside whether it passed, for the report: a table, or numbers.
Details: TypeAlias = dict[str, Any]
# Yields the cases of a check; may add details. The CannotCheck that it raises, at its end too, says
# why there are no cases, and counts only if there were none.
Cases: TypeAlias = Callable[[Subject, Details], Iterator[Case]]


class CheckKind(NamedTuple):
    """One check of any operator.

    Attributes:
        name: the family, and the check in it: `"memory.transposed"`.
        question: what it answers, for the report.
        cases: what is tried.
        is_costly: whether it takes seconds, so that it comes last.
    """

    name: str
    question: str
    cases: Cases
    is_costly: bool = False


def family(name: str, *checks: Any, **options: Any) -> tuple[CheckKind, ...]:
    """The checks of a family: functions that yield cases, with the question as docstring."""
    questions = [(cases.__doc__ or "").partition("\n")[0] for cases in checks]  # none with -OO
    return tuple(
        CheckKind(f"{name}.{cases.__name__}", question, cases, **options)
        for cases, question in zip(checks, questions, strict=True)
    )


def variants(
    name: str, questions: Mapping[str, str], cases: Callable[..., Iterator[Case]], **options: Any
) -> tuple[CheckKind, ...]:
    """Checks of a family that differ in what is varied, which `cases` gets as first argument."""
    return tuple(
        CheckKind(f"{name}.{each}", question, functools.partial(cases, each), **options)
        for each, question in questions.items()
    )
