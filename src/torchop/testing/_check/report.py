"""The report of `check`, as text, JSON, HTML, and a table in notebooks."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from torchop._compat import devices
from torchop.testing._check.findings import Finding, Outcome, Result, grouped
from torchop.testing._extras import installing

# Signs in the matrix of the page, because colour alone is not accessible.
_SIGNS: dict[Outcome, str] = {
    "passed": "✓",
    "failed": "✗",
    "expected failure": "!",
    "cannot be done": "\N{EN DASH}",
    "not run": "…",
}


def environment() -> dict[str, str]:
    """Return the versions and devices of this process."""
    names = [f"CPU ({os.cpu_count()} cores, {platform.machine()})"]
    accelerator = devices.accelerator()
    if accelerator is not None:
        names += accelerator.names()
    return {
        # Not importlib.metadata, because a package on PYTHONPATH has no metadata.
        "torchop": sys.modules["torchop"].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(names),
    }


@dataclass(frozen=True)
class CheckReport:
    """The report of `torchop.testing.check`. Print it, or show it in a notebook.

    Attributes:
        op: the name of the operator.
        schema: its schema.
        results: the result of each check, in the order of execution.
        seed: the seed of the generated inputs.
        seconds: the duration of all checks.
        call_costs: microseconds per call of the first example, by way of calling.
        environment: versions and devices.
        allow_not_run: whether checks that were not run do not count as failures.

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
    call_costs: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=environment)
    allow_not_run: bool = False

    @property
    def ok(self) -> bool:
        """Whether no check failed unexpectedly, and all were run, unless they need not be."""
        return not self.failures and (self.allow_not_run or not self.count("not run"))

    @property
    def failures(self) -> tuple[Result, ...]:
        """The results of failed checks."""
        return tuple(result for result in self.results if result.outcome == "failed")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The failures, grouped by their cause, with the clearest one first."""
        return grouped(self.failures)

    def count(self, outcome: Outcome) -> int:
        """Return the number of checks with this outcome."""
        return sum(result.outcome == outcome for result in self.results)

    def by_outcome(self) -> dict[Outcome, list[Result]]:
        """Group the results by outcome: failures first, passed checks last."""
        found: dict[Outcome, list[Result]] = {outcome: [] for outcome in _SIGNS}
        for result in self.results:
            found[result.outcome].append(result)
        found["passed"] = found.pop("passed")
        return {outcome: results for outcome, results in found.items() if results}

    def by_provider(self) -> dict[str, CheckReport]:
        """Return one report per provider, whose `op` is `"ns::name[provider]"`.

        The key of the reference is an empty string, and its `op` is the name of the operator.
        """
        found: dict[str, list[Result]] = {"": []}
        for result in self.results:
            plain = dataclasses.replace(result, check=result.check.partition("[")[0])
            found.setdefault(result.provider, []).append(plain)
        return {
            name: dataclasses.replace(
                self,
                op=f"{self.op}[{name}]" if name else self.op,
                results=tuple(results),
                seconds=sum(result.seconds for result in results) if name else self.seconds,
                call_costs={} if name else self.call_costs,
            )
            for name, results in found.items()
            if results
        }

    def summary(self) -> str:
        """Return one line with the number of checks per outcome."""
        counts = [f"{n} {outcome}" for outcome in _SIGNS if (n := self.count(outcome))]
        return f"{self.op}: {', '.join(counts)} ({self.seconds:.1f} s, seed {self.seed})"

    def __str__(self) -> str:
        lines = [self.summary()]
        for outcome, verb in (
            ("expected failure", "expected to fail"),
            ("cannot be done", "cannot be done because"),
            ("not run", "not run"),
        ):
            # Checks with the same reason share a line, because reasons can be long.
            checks: dict[str, list[str]] = {}
            for result in self.results:
                if result.outcome == outcome and not result.provider:
                    checks.setdefault(result.message, []).append(result.check)
            lines += [f"  {', '.join(names)}: {verb}: {why}" for why, names in checks.items()]
        for name, report in self.by_provider().items():
            one, *others = {result.message for result in report.results}
            left_out = f": {one}" if one and not others else ""  # the provider is unavailable
            lines += [f"  {report.summary()}{left_out}"] if name else []
        rejected = sum(result.rejected for result in self.results)
        lines += [f"  not tried: {rejected} variants that 'valid' rejects"] if rejected else []
        told: dict[str, list[str]] = {}
        for result in self.results:
            for name, table in result.details.items():
                told.setdefault(f"{name}: {_in_words(table)}", []).append(result.check)
        lines += [f"  {', '.join(names)}: {words}" for words, names in told.items()]
        costly = sorted(self.results, key=lambda r: -r.seconds)[:5]
        if self.seconds:
            costs = ", ".join(f"{r.check} {r.seconds:.2f} s" for r in costly)
            lines.append(f"  most of the time: {costs}")
        return "\n".join([*lines, *self._failures_in_words()])

    def in_short(self) -> str:
        """Return only the summary and the failures, as text."""
        return "\n".join([self.summary(), *self._failures_in_words()])

    def _failures_in_words(self) -> list[str]:
        """Each finding with its program, and the names of other checks with the same cause."""
        lines = []
        if not self.allow_not_run and (missing := self.count("not run")):
            why = next(result.message for result in self.results if result.outcome == "not run")
            lines.append(
                f"  that {missing} of the checks were not run is a failure: {why}. Give them time, "
                "or pass allow_not_run."
            )
        for failure, others in self.findings:
            lines += ["", f"FAILED {failure.check}: {failure.message}"]
            lines += [f"  also fails: {', '.join(others)}"] if others else []
            lines += ["", *(f"    {line}".rstrip() for line in failure.program.splitlines())]
        return lines

    def _repr_html_(self) -> str:
        """Return tables for notebooks, with the passed checks folded."""
        import html  # only notebooks need it

        def table(results: Sequence[Result]) -> str:
            rows = "".join(
                f"<tr><td>{html.escape(r.check)}</td><td>{html.escape(r.outcome)}</td>"
                f"<td style='text-align:left'>{html.escape(r.message)}</td>"
                f"<td>{r.seconds:.2f} s</td></tr>"
                for r in results
            )
            head = "<tr><th>check</th><th>outcome</th><th>message</th><th>cost</th></tr>"
            return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"

        found = self.by_outcome()
        passed = found.pop("passed", [])
        return (
            f"<p><b>{html.escape(self.summary())}</b></p>{table(list(chain(*found.values())))}"
            f"<details><summary>{len(passed)} passed</summary>{table(passed)}</details>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, which `to_json` writes and `from_dict` reads."""
        return {"format": 1, "ok": self.ok, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckReport:
        """Return the report that `to_dict` converted, possibly in another process.

        Raises:
            ValueError: the values are not a report.
        """
        if values.get("format") != 1:
            raise ValueError(
                "this is not a report of torchop.testing.check, or it is one of a later version"
            )
        fields = {key: values[key] for key in values if key not in ("format", "ok", "results")}
        return cls(results=tuple(Result(**result) for result in values["results"]), **fields)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON.

        Args:
            path: the file to replace.
        """
        write_json(self.to_dict(), path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained page of HTML.

        Args:
            path: the file to replace.

        Raises:
            ModuleNotFoundError: jinja2 is missing. The extra `torchop[check]` installs it.
        """
        write_html([self], path)


def write_json(values: Any, path: str | os.PathLike[str]) -> None:
    """Write values as JSON. Values that JSON cannot represent are written as `str(value)`."""
    Path(path).write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf-8")


def write_html(reports: Sequence[CheckReport], path: str | os.PathLike[str]) -> None:
    """Write the reports of several operators as one self-contained page of HTML."""
    try:
        import jinja2  # optional
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"to_html needs jinja2: {installing('check')}", name="jinja2"
        ) from None
    source = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    reports = sorted(reports, key=lambda report: report.ok)  # failures first
    # A report without results has only call costs.
    reports = [each for one in reports for each in one.by_provider().values() or [one]]
    results = [result for report in reports for result in report.results]
    checks = dict.fromkeys(result.check for result in results)
    page = template.from_string(source).render(
        reports=reports,
        checks=list(checks),
        undone=checks.keys() - {r.check for r in results if r.outcome != "cannot be done"},
        families=list(dict.fromkeys(result.family for result in results)),
        counts=Counter(result.outcome for result in results),
        signs=_SIGNS,
    )
    Path(path).write_text(page, encoding="utf-8")


def _in_words(table: Any) -> str:
    if isinstance(table, Mapping):
        return ", ".join(f"{key} {value}" for key, value in table.items())
    if isinstance(table, (list, tuple)):
        return ", ".join(map(str, table))
    return str(table)
