"""The pytest plugin: plans a test for each operator and check, runs it, and reports.

The hooks are in the package `pytest_torchop`, which does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchop._accelerate import patterns
from torchop.extend import OpName
from torchop.testing._check import api
from torchop.testing._check.expected import Expectation, as_expected, expected_for
from torchop.testing._check.findings import Result
from torchop.testing._check.report import CheckReport, write_html, write_json
from torchop.testing._check.run import Check, plan_checks, program_of, run_check

# What `pytest.mark.torchop` passes on to `plan_checks`.
_OPTIONS = ("only", "examples", "reference", "expected", "seed", "rtol", "atol")
# Of these, a mapping by patterns says which operator each is for.
_BY_OPERATOR = ("examples", "reference", "expected")
# The name of the one test of an operator of which no check can be planned.
_NO_PLAN = "examples"


@dataclasses.dataclass(eq=False)
class _Operator:
    """An operator in a marked test."""

    name: str
    options: Mapping[str, Any]


class _Planned(NamedTuple):
    """One test: one check of one operator."""

    op: _Operator
    check: str
    problem: str | None = None  # why nothing can be planned for the operator


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Makes a marked test one for each operator and check."""
    planned = [
        each
        for mark in metafunc.definition.iter_markers("torchop")
        for each in _planned(metafunc.definition.nodeid, mark)
    ]
    names = [f"{each.op.name}-{each.check}" for each in planned]
    metafunc.parametrize("torchop_check", planned, ids=names, indirect=True)


def _planned(test: str, mark: pytest.Mark) -> Iterator[_Planned]:
    unknown = sorted(mark.kwargs.keys() - {"exclude", *_OPTIONS})
    if unknown:
        expected = ", ".join(("exclude", *_OPTIONS))
        _refuse(f"{test}: pytest.mark.torchop has no argument {unknown[0]!r}, but {expected}.")
    excluded = mark.kwargs.get("exclude", ())
    excluded = (excluded,) if isinstance(excluded, str) else tuple(excluded)
    try:
        patterns.check_patterns("pytest.mark.torchop", mark.args)
    except (TypeError, ValueError) as error:
        _refuse(f"{test}: {error}")
    names = list(patterns.all_names())
    for pattern in (*mark.args, *excluded):
        if not any(patterns.is_match(name, pattern) for name in names):
            problem = patterns.why_nothing_matches("pytest.mark.torchop", pattern)
            _refuse(f"{test}: {problem} Import the module that registers the operators first.")
    for name in sorted(set(names)):
        if _matches(name, mark.args) and not _matches(name, excluded):
            yield from _planned_for(str(name), mark.kwargs)


def _refuse(message: str) -> None:
    pytest.fail(message, pytrace=False)


def _matches(name: OpName, wanted: Sequence[str]) -> bool:
    return any(patterns.is_match(name, pattern) for pattern in wanted)


def _planned_for(op: str, kwargs: Mapping[str, Any]) -> Iterator[_Planned]:
    options = {key: _option(op, key, kwargs[key]) for key in _OPTIONS if key in kwargs}
    options = {key: value for key, value in options.items() if value is not None}
    operator = _Operator(op, options)
    try:
        checks = plan_checks(op, **options)
    except Exception as error:
        yield _Planned(operator, _NO_PLAN, f"{type(error).__name__}: {error}")
        return
    for check in checks:
        yield _Planned(operator, check.name)


def _option(op: str, key: str, value: Any) -> Any:
    """The value of an option for one operator; None if it has none."""
    if key not in _BY_OPERATOR or not isinstance(value, Mapping):
        return value
    if key == "expected":
        return expected_for(op, value)
    return patterns.value_for(OpName.parse(op), value)


# --------------------------------------------------------------------------------------------------
# Running

_CHECK = pytest.StashKey["PlannedCheck"]()


# The checks of an operator share what they know of it, until the tests of the next one begin.
@functools.lru_cache(maxsize=1)
def _checks(op: _Operator) -> Mapping[str, Check]:
    return {check.name: check for check in plan_checks(op.name, **op.options)}


@functools.lru_cache(maxsize=1)
def _costs(op: _Operator) -> Mapping[str, float]:
    return api.call_costs(next(iter(_checks(op).values())).subject)


def planned_check(request: pytest.FixtureRequest) -> PlannedCheck:
    """Return the value of `torchop_check` in a test."""
    if not hasattr(request, "param"):
        _refuse(f"{request.node.nodeid} takes torchop_check, but is not marked with torchop.")
    check = PlannedCheck(request.param, request.config)
    request.node.stash[_CHECK] = check
    return check


class PlannedCheck:
    """What `torchop_check` is in a marked test: called, it runs the one check of the test.

    A check that passes returns its `Result`. One that fails fails the test, with the program to
    paste; one that cannot be done skips it, with the reason; one that was expected to fail is an
    expected failure.

    Attributes:
        op: the name of the operator.
        check: the name of the check, such as `"memory.transposed"`.
    """

    def __init__(self, planned: _Planned, config: pytest.Config) -> None:
        self.op, self.check = planned.op.name, planned.check
        self.report: CheckReport | None = None
        self._planned, self._config, self._started = planned, config, time.time()

    def __repr__(self) -> str:
        return f"torchop_check({self.op}, {self.check})"

    def __call__(self) -> Result:
        __tracebackhide__ = True
        self.report = report = self._run()
        (result,) = report.results
        if result.outcome == "failed":
            _refuse(_in_words(self.op, result))
        if result.outcome == "expected failure":
            pytest.xfail(" ".join(result.message.split()))
        if result.outcome != "passed":
            pytest.skip(result.message)
        return result

    def _run(self) -> CheckReport:
        """Return the report of the check."""
        op = self._planned.op
        if self._planned.problem is not None:
            return CheckReport(op.name, "", (Result(self.check, "failed", self._planned.problem),))
        check = _checks(op)[self.check]
        costs = _costs(op) if self._config.getoption("--torchop-report") else {}
        schema, seed = str(check.subject.schema), check.subject.seed
        report = CheckReport(op.name, schema, (), seed, call_costs=costs)
        file = getattr(self._config, "workerinput", {}).get("torchop_call")
        if file is not None:
            check = _written(check, report, file, self._started)
        return dataclasses.replace(report, results=(run_check(check),))


def _in_words(op: str, result: Result) -> str:
    """The failure of a test: the operator, the check, the fault and the program."""
    return f"{op}: {result.check}: {result.message}\n\n{result.program}".rstrip()


def add_result(item: pytest.Item, report: Any) -> None:
    """Add the result of a marked test to its report; fail a test that did not run its check."""
    check = item.stash.get(_CHECK, None)
    if check is None:  # the fixture has another definition
        return
    if check.report is not None:
        # As text, because pytest-xdist sends nothing but plain values.
        report.torchop = json.dumps(check.report.to_dict(), default=str)
    elif report.passed:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} did not run its check, {check.check} of {check.op}: call "
            "torchop_check() in the test."
        )


# --------------------------------------------------------------------------------------------------
# Crashes in workers of pytest-xdist


@functools.cache
def _traceback_file(path: str) -> int:
    """Return the descriptor of a file to which faulthandler writes from now on."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    faulthandler.enable(descriptor, all_threads=False)
    return descriptor


def _written(check: Check, report: CheckReport, file: str, started: float) -> Check:
    """Return the check; before each of its calls, `file` has all that a crash is reported with."""
    values = {
        "report": report.to_dict(),
        "check": check.name,
        "expected": check.expected,
        "started": started,
    }

    def write(label: str, program: str) -> None:
        text = json.dumps({**values, "label": label, "program": program}, default=str)
        Path(file).write_text(text, encoding="utf-8")

    def cases(subject: Any, details: Any) -> Iterator[Any]:
        for case in check.kind.cases(subject, details):
            program = ""
            with contextlib.suppress(Exception):  # the call is made all the same
                program = program_of(check, case)
            write(case.label, program)
            yield case

    write("before the first call", "")
    os.ftruncate(_traceback_file(f"{file}.crash"), 0)
    return dataclasses.replace(check, kind=dataclasses.replace(check.kind, cases=cases))


def report_crash(report: Any, worker: Any) -> None:
    """Complete the report of a test whose worker crashed, or was ended by pytest-timeout."""
    file = Path(worker.workerinput["torchop_call"])
    values = json.loads(file.read_text(encoding="utf-8"))
    limit = worker.config.getoption("timeout", None)
    # The clock of pytest-timeout starts a little earlier.
    hangs = limit is not None and time.time() - values["started"] > 0.95 * limit
    problem = f"took over {limit:g} seconds" if hangs else "ended the process"
    message = f"{values['label']}: it {problem}."
    _, crash, traceback = file.with_name(f"{file.name}.crash").read_text().partition("error: ")
    if crash:
        innermost = [line.strip() for line in traceback.splitlines() if "File " in line][:3]
        message += f" {' '.join([traceback.partition(chr(10))[0], *innermost])}"
    result = Result(
        values["check"], "failed", message, values["program"], cause=f"the call {problem}"
    )
    report.longrepr = _in_words(values["report"]["op"], result)
    if values["expected"] is not None:
        result = as_expected(result, Expectation(*values["expected"]))
        report.outcome, report.wasxfail = "skipped", result.message
    found = dataclasses.replace(CheckReport.from_dict(values["report"]), results=(result,))
    report.torchop = json.dumps(found.to_dict(), default=str)


# --------------------------------------------------------------------------------------------------
# The report


def write_report(test_reports: Sequence[Any], path: Path) -> None:
    """Writes what the tests came to: HTML, or JSON if the file is called so."""
    by_operator: dict[str, list[CheckReport]] = {}
    for test in test_reports:
        report = CheckReport.from_dict(json.loads(test.torchop))
        by_operator.setdefault(report.op, []).append(report)
    reports = [_together(by_operator[op]) for op in sorted(by_operator)]
    if path.suffix == ".json":
        values = [report.to_dict() for report in reports]
        write_json(values, path)
    else:
        write_html(reports, path)


def _together(reports: Sequence[CheckReport]) -> CheckReport:
    """One report of the checks of one operator, each of which has been a test."""
    results = tuple(result for report in reports for result in report.results)
    return dataclasses.replace(
        reports[0],
        schema=next((report.schema for report in reports if report.schema), reports[0].op),
        results=results,
        seconds=sum(result.seconds for result in results),
        call_costs=next((report.call_costs for report in reports if report.call_costs), {}),
    )
