"""The report: the outcome of each check, as text, as a table in notebooks, in JSON and HTML."""

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

# The sign in a cell of the page's matrix, because colour alone is not enough.
_SIGNS: dict[Outcome, str] = {
    "passed": "✓",
    "failed": "✗",
    "expected failure": "!",
    "cannot be done": "\N{EN DASH}",
    "not run": "…",
}


def environment() -> dict[str, str]:
    """The versions and devices of this process."""
    names = [f"CPU ({os.cpu_count()} cores, {platform.machine()})"]
    accelerator = devices.accelerator()
    if accelerator is not None:
        names += accelerator.names()
    return {
        # Not that of its metadata, which a package that is found by its path does not have.
        "torchop": sys.modules["torchop"].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(names),
    }


@dataclass(frozen=True)
class CheckReport:
    """What `torchop.testing.check` found. Print it, or show it in a notebook.

    Attributes:
        op: the name of the operator.
        schema: its schema.
        results: the result of each check, in the order in which they ran; what is shown has the
            failures first.
        seed: the seed of the generated inputs.
        seconds: how long all checks took.
        call_costs: microseconds for one call of the first example, by the way of calling.
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
        """What the checks found: the results of those that failed."""
        return tuple(result for result in self.results if result.outcome == "failed")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The failures, grouped by their cause, with the clearest one first."""
        return grouped(self.failures)

    def count(self, outcome: Outcome) -> int:
        """How many checks have this outcome."""
        return sum(result.outcome == outcome for result in self.results)

    def by_outcome(self) -> dict[Outcome, list[Result]]:
        """The results by their outcome: first what failed, and last what passed."""
        found: dict[Outcome, list[Result]] = {outcome: [] for outcome in _SIGNS}
        for result in self.results:
            found[result.outcome].append(result)
        found["passed"] = found.pop("passed")
        return {outcome: results for outcome, results in found.items() if results}

    def by_provider(self) -> dict[str, CheckReport]:
        """One report for each provider, by its name, in which `op` is such as `ns::name[triton]`.

        The name of the reference is an empty string, and `op` is there that of the operator.
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
        """One line: how many checks have each outcome."""
        counts = [f"{n} {outcome}" for outcome in _SIGNS if (n := self.count(outcome))]
        return f"{self.op}: {', '.join(counts)} ({self.seconds:.1f} s, seed {self.seed})"

    def __str__(self) -> str:
        lines = [self.summary()]
        for outcome, verb in (
            ("expected failure", "expected to fail"),
            ("cannot be done", "cannot be done because"),
            ("not run", "not run"),
        ):
            # Checks that have one reason share a line, because reasons can be long.
            checks: dict[str, list[str]] = {}
            for result in self.results:
                if result.outcome == outcome and not result.provider:
                    checks.setdefault(result.message, []).append(result.check)
            lines += [f"  {', '.join(names)}: {verb}: {why}" for why, names in checks.items()]
        for name, report in self.by_provider().items():
            one, *others = {result.message for result in report.results}
            left_out = f": {one}" if one and not others else ""  # the provider cannot run here
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
        """What failed or was not run, as text."""
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
        """Tables for notebooks: what did not pass, and, folded, what did."""
        import html  # needed in notebooks alone

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
        """The report as plain values, which `from_dict` reads: what `to_json` writes."""
        return {"format": 1, "ok": self.ok, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckReport:
        """The report that `to_dict` wrote, perhaps in another process.

        Raises:
            ValueError: these are not the values of a report.
        """
        if values.get("format") != 1:
            raise ValueError(
                "this is not a report of torchop.testing.check, or it is one of a later version"
            )
        fields = {key: values[key] for key in values if key not in ("format", "ok", "results")}
        return cls(results=tuple(Result(**result) for result in values["results"]), **fields)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as JSON.

        Args:
            path: the file, which is replaced.
        """
        write_json(self.to_dict(), path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one page of HTML, without other files.

        Args:
            path: the file, which is replaced.

        Raises:
            ModuleNotFoundError: jinja2 is missing, which the extra `check` of torchop installs.
        """
        write_html([self], path)


def write_json(values: Any, path: str | os.PathLike[str]) -> None:
    """Writes plain values as JSON; what JSON has no form for, as its text."""
    Path(path).write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf-8")


def write_html(reports: Sequence[CheckReport], path: str | os.PathLike[str]) -> None:
    """Writes the reports of several operators as one page of HTML, which needs no network."""
    try:
        import jinja2  # it may be missing
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"to_html needs jinja2: {installing('check')}", name="jinja2"
        ) from None
    source = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    reports = sorted(reports, key=lambda report: report.ok)  # those with failures come first
    # One without results is of calls alone.
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
