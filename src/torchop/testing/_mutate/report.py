"""What became of the changes: as text, and in JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torchop.testing._check.report import environment, write_json
from torchop.testing._mutate.installing import Mutant

Outcome = Literal["killed", "timed out", "survived", "equal", "not run"]
_IN_WORDS: dict[Outcome, str] = {
    "killed": "noticed",
    "timed out": "timed out",
    "survived": "survived",
    "equal": "without effect",
    "not run": "not run",
}


@dataclass(frozen=True)
class Verdict:
    """What became of one change.

    Attributes:
        mutant: the change.
        outcome: `"killed"`: a check failed; `"timed out"`: a check took too long; `"survived"`: no
            check failed, although calls have other results; `"equal"`: no check failed, and all
            calls that were compared have the same results, to the bit, so it may change nothing;
            `"not run"`: the budget was spent before.
        check: the check that failed or took too long.
        message: what it said.
    """

    mutant: Mutant
    outcome: Outcome
    check: str = ""
    message: str = ""


@dataclass(frozen=True)
class MutationReport:
    """Which changes of an operator's functions are noticed. Print it.

    Attributes:
        op: the name of the operator.
        verdicts: what became of each change, in the order of the source.
        refused: the functions that cannot be changed, with the reason for each.
        failing: the checks that fail without a change, and so notice none.
        seed: the seed of the generated inputs.
        seconds: how long it took.
        environment: versions and devices.
        has_reference: whether values were compared with those of a reference.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::one_more", mutates_args=())
        ... def one_more(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1
        >>> report = torchop.testing.mutate(
        ...     one_more, (torch.ones(2),), reference=lambda x: 1 + x, only="memory.given"
        ... )
        >>> report.survivors, report.by_check()
        ([], {'memory.given': 2})
    """

    op: str
    verdicts: tuple[Verdict, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    failing: tuple[str, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=environment)
    has_reference: bool = False

    def with_outcome(self, outcome: Outcome) -> list[Verdict]:
        """The changes with an outcome."""
        return [verdict for verdict in self.verdicts if verdict.outcome == outcome]

    @property
    def survivors(self) -> list[Verdict]:
        """The changes that no check noticed, although calls have other results."""
        return self.with_outcome("survived")

    def summary(self) -> str:
        """One line: how many changes have each outcome."""
        counts = Counter(verdict.outcome for verdict in self.verdicts)
        parts = [f"{counts[each]} {word}" for each, word in _IN_WORDS.items() if counts[each]]
        counted = ", ".join(parts) or "nothing to change"
        return f"{self.op}: {len(self.verdicts)} changes: {counted} ({self.seconds:.1f} s)"

    def __str__(self) -> str:
        lines = [self.summary()]
        for outcome, heading in (
            ("survived", "SURVIVED, although calls have other results"),
            ("equal", "WITHOUT EFFECT on any call that was compared"),
        ):
            for verdict in self.verdicts:
                if verdict.outcome == outcome:
                    mutant = verdict.mutant
                    place = f"{mutant.file}:{mutant.line}"
                    lines += ["", f"{heading}: {mutant.change}, in the {mutant.role}, {place}"]
                    lines += [f"    {line}".rstrip() for line in mutant.diff.splitlines()[2:]]
        by_check = self.by_check()
        if by_check:
            noticed = ", ".join(f"{check} {count}" for check, count in by_check.items())
            lines += ["", f"noticed by: {noticed}"]
        if self.failing:
            lines.append(f"fail without a change, and notice none: {', '.join(self.failing)}")
        lines += [f"not changed: {name}: {reason}" for name, reason in self.refused.items()]
        unnoticed = (*self.survivors, *self.with_outcome("equal"))
        if not self.has_reference and any(v.mutant.role == "kernel" for v in unnoticed):
            lines.append(
                "A kernel is compared with itself unless there is a reference: pass reference=, or "
                "--reference."
            )
        return "\n".join(lines)

    def by_check(self) -> dict[str, int]:
        """How many changes each check noticed, most first."""
        return dict(Counter(each.check for each in self.with_outcome("killed")).most_common())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values: what `to_json` writes."""
        return {"format": 1, **asdict(self)}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as JSON.

        Args:
            path: the file, which is replaced.
        """
        write_json(self.to_dict(), path)
