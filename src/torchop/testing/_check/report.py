"""The report of `check`, as text and as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from torchop._compat import devices
from torchop.testing._check.findings import Finding, Outcome, Result, grouped


def environment() -> dict[str, str]:
    names = [f"CPU ({os.cpu_count()} cores, {platform.machine()})"]
    accelerator = devices.accelerator()
    if accelerator is not None:
        names += accelerator.names()
    return {
        # importlib.metadata fails if torchop is imported from PYTHONPATH without being installed.
        "torchop": sys.modules["torchop"].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(names),
    }


@dataclass(frozen=True, repr=False)
class CheckReport:
    """The report of `torchop.testing.check`. Print it to see the outcome of each check.

    Attributes:
        op: the name of the operator.
        schema: the schema of the operator.
        results: the result of each check, in the order of execution.
        seed: the seed of the generated inputs.
        seconds: the duration of all checks.
        environment: the versions of packages, and the devices.
        allow_not_run: whether the report may be `ok` although some checks did not run.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::report_me", mutates_args=())
        ... def report_me(x: torch.Tensor) -> torch.Tensor:
        ...     return x.cos()
        >>> report = torchop.testing.check(report_me, (torch.randn(3),), only="memory.*")
        >>> report.ok, report.failures
        (True, ())
    """

    op: str
    schema: str
    results: tuple[Result, ...]
    seed: int = 0
    seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=environment)
    allow_not_run: bool = False

    @property
    def ok(self) -> bool:
        """Whether no check failed, every check ran in time, and at least one check could be done.

        With `allow_not_run`, only failed checks count.
        """
        return not self.failures and not self._not_run()

    @property
    def failures(self) -> tuple[Result, ...]:
        """The results of failed checks."""
        return tuple(result for result in self.results if result.outcome == "failed")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The failures, grouped by cause. Each group starts with its clearest failure."""
        return grouped(self.failures)

    def count(self, outcome: Outcome) -> int:
        """Return the number of checks with this outcome."""
        return sum(result.outcome == outcome for result in self.results)

    def summary(self) -> str:
        """Return one line with the number of checks per outcome."""
        counts = [f"{n} {outcome}" for outcome in get_args(Outcome) if (n := self.count(outcome))]
        return f"{self.op}: {', '.join(counts)} ({self.seconds:.1f} s, seed {self.seed})"

    def __str__(self) -> str:
        lines = [self.summary()]
        for outcome, verb in (
            ("expected failure", "expected to fail"),
            ("cannot be done", "cannot be done because"),
            ("not run", "not run"),
        ):
            # Reasons can be long, so print a reason that several checks share only once.
            checks: dict[str, list[str]] = {}
            for result in self.results:
                if result.outcome == outcome:
                    checks.setdefault(result.message, []).append(result.check)
            lines += [f"  {', '.join(names)}: {verb}: {why}" for why, names in checks.items()]
        rejected = sum(result.rejected for result in self.results)
        lines += [f"  not tried: {rejected} variants that 'valid' rejects"] if rejected else []
        details: dict[str, list[str]] = {}
        for result in self.results:
            for name, table in result.details.items():
                details.setdefault(f"{name}: {_in_words(table)}", []).append(result.check)
        lines += [f"  {', '.join(names)}: {words}" for words, names in details.items()]
        return "\n".join([*lines, *self._problems()])

    __repr__ = __str__  # notebooks display the repr

    def in_short(self) -> str:
        """Return the summary line followed by the failures."""
        return "\n".join([self.summary(), *self._problems()])

    def _not_run(self) -> str:
        """Return why the report is incomplete, or an empty string if every check was run."""
        if self.allow_not_run:
            return ""
        if missing := self.count("not run"):
            why = next(result.message for result in self.results if result.outcome == "not run")
            return f"{missing} checks did not run: {why}. Give them time, or pass allow_not_run."
        if self.count("cannot be done") == len(self.results):
            return "no check could be done. Choose other checks, or other examples."
        return ""

    def _problems(self) -> list[str]:
        problem = self._not_run()
        lines = [f"  {problem}"] if problem else []
        for failure, others in self.findings:
            lines += ["", f"FAILED {failure.check}: {failure.message}"]
            lines += [f"  also fails: {', '.join(others)}"] if others else []
            lines += ["", *(f"    {line}".rstrip() for line in failure.program.splitlines())]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict that can be passed to `from_dict`."""
        return {"format": 1, "ok": self.ok, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckReport:
        """Return the report that `to_dict` converted to a dict, possibly in another process.

        Raises:
            ValueError: the values are not the result of `to_dict`.
        """
        if values.get("format") != 1:
            raise ValueError(
                "this is not a report of torchop.testing.check, or it is one of a later version"
            )
        fields = {key: values[key] for key in values if key not in ("format", "ok", "results")}
        # JSON has no tuples, so convert the list.
        results = (
            Result(**{**result, "changes": tuple(result.get("changes", ()))})
            for result in values["results"]
        )
        return cls(results=tuple(results), **fields)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON.

        Args:
            path: the file to replace.
        """
        write_json(self.to_dict(), path)


def write_json(values: Any, path: str | os.PathLike[str]) -> None:
    """Write values as JSON, using `str(value)` for objects that JSON cannot represent."""
    Path(path).write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf-8")


def _in_words(table: Any) -> str:
    if isinstance(table, Mapping):
        return ", ".join(f"{key} {value}" for key, value in table.items())
    if isinstance(table, (list, tuple)):
        return ", ".join(map(str, table))
    return str(table)
