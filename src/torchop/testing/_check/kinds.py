"""The kinds of checks: a name, a question, and the cases that answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torchop.testing._check.subject import Case, Subject

# What a check tells beside whether it passed, for the report: a table, or numbers.
Details: TypeAlias = dict[str, Any]


class CheckKind(NamedTuple):
    """One check of any operator.

    Attributes:
        name: the family, and the check in it: `"memory.transposed"`.
        question: what it answers, for the report.
        cases: yields the cases; may add details. The CannotCheck that it raises, at its end too,
            says why there are no cases, and counts only if there were none.
        is_costly: whether it takes seconds, so that it comes last.
        on_request: whether it only runs where it is named.
    """

    name: str
    question: str
    cases: Callable[[Subject, Details], Iterator[Case]]
    is_costly: bool = False
    on_request: bool = False

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]
