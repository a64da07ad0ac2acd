"""The pytest plugin: generate a test for each operator and check, run it, and report the result.

The pytest hooks are in the package `pytest_torchop`, which does not import PyTorch. It imports this
module only when a test needs it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchop._accelerate import patterns
from torchop.extend import OpName
from torchop.testing._check.findings import Result, explaining
from torchop.testing._check.report import CheckReport, write_json
from torchop.testing._check.run import (
    Check,
    expected_failures,
    plan_checks,
    run_check,
    shortened,
)
from torchop.testing._fork import can_fork
from torchop.testing._worker import CheckWorker, crashed, noted

# The arguments of `pytest.mark.torchop` that are passed to `plan_checks`.
_OPTIONS = ("only", "examples", "reference", "seed", "rtol", "atol")
# If the checks of an operator cannot be listed, for example because it has no examples, the
# operator gets a single failing test with this name.
_NO_PLAN = "examples"


@dataclasses.dataclass(eq=False)
class _Operator:
    """An operator to test, its options from `pytest.mark.torchop`, and its failures so far."""

    name: str
    options: Mapping[str, Any]
    failures: list[Result] = dataclasses.field(default_factory=list)


class _Planned(NamedTuple):
    """A test that runs one check of one operator.

    `problem` is the reason why the checks of the operator cannot be listed, and `expected` is the
    reason why the check is expected to fail. Both are empty for ordinary tests.
    """

    op: _Operator
    check: str
    problem: str = ""
    expected: str = ""


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Turn a marked test into one test for each operator and check."""
    parameters = [
        parameter
        for mark in metafunc.definition.iter_markers("torchop")
        for parameter in _parameters(metafunc.definition.nodeid, mark)
    ]
    metafunc.parametrize("torchop_check", parameters, indirect=True)


def _parameters(test: str, mark: pytest.Mark) -> Iterator[Any]:
    known = ("exclude", "expected", *_OPTIONS)
    unknown = sorted(mark.kwargs.keys() - set(known))
    if unknown:
        _fail(
            f"{test}: pytest.mark.torchop has no argument {unknown[0]!r}. Its arguments are "
            f"{', '.join(known)}."
        )
    excluded = mark.kwargs.get("exclude", ())
    excluded = (excluded,) if isinstance(excluded, str) else tuple(excluded)
    try:
        patterns.check_patterns("pytest.mark.torchop", mark.args)
    except (TypeError, ValueError) as error:
        _fail(f"{test}: {error}")
    names = list(patterns.all_names())
    for pattern in (*mark.args, *excluded):
        if not any(patterns.is_match(name, pattern) for name in names):
            problem = patterns.why_nothing_matches("pytest.mark.torchop", pattern)
            _fail(f"{test}: {problem} Import the module that registers the operators first.")
    for name in sorted(set(names)):
        if _matches(name, mark.args) and not _matches(name, excluded):
            for planned, is_strict in _planned(name, mark.kwargs):
                marks = (
                    [pytest.mark.xfail(reason=planned.expected, strict=is_strict)]
                    if planned.expected
                    else []
                )
                yield pytest.param(planned, marks=marks, id=f"{name}-{planned.check}")


def _fail(message: str) -> None:
    pytest.fail(message, pytrace=False)


def _matches(name: OpName, wanted: Sequence[str]) -> bool:
    return any(patterns.is_match(name, pattern) for pattern in wanted)


def _planned(name: OpName, kwargs: Mapping[str, Any]) -> Iterator[tuple[_Planned, bool]]:
    """Yield each test of an operator, along with whether its xfail mark is strict."""
    options = {key: _of_operator(name, kwargs[key]) for key in _OPTIONS if key in kwargs}
    options = {key: value for key, value in options.items() if value is not None}
    operator = _Operator(str(name), options)
    try:
        checks = plan_checks(operator.name, **options)
        expected = expected_failures(name, kwargs.get("expected", {}))
        for check in checks:
            named = next(filter(check.is_named, expected), "")
            # If `expected` lists a check by name, the check must fail, so its xfail mark is strict.
            # If `expected` lists a family or a pattern, some of the matching checks may pass, so
            # the mark is not strict.
            is_strict = named in (check.name, check.name.partition(".")[2])
            yield _Planned(operator, check.name, expected=expected.get(named, "")), is_strict
    except Exception as error:
        yield _Planned(operator, _NO_PLAN, f"{type(error).__name__}: {error}"), False


def _of_operator(name: OpName, value: Any) -> Any:
    """Return the value of an option for one operator.

    `value` applies to all operators, unless it is a mapping from patterns of operator names to
    values.
    """
    return patterns.value_for(name, value) if isinstance(value, Mapping) else value


# --------------------------------------------------------------------------------------------------
# Running

_CHECK = pytest.StashKey["PlannedCheck"]()


# Cache the checks of an operator, because they share recorded calls. The tests of an operator run
# consecutively, so caching the checks of a single operator is enough.
@functools.lru_cache(maxsize=1)
def _checks(op: _Operator) -> Mapping[str, Check]:
    return {check.name: check for check in plan_checks(op.name, **op.options)}


# The time limit in seconds of a check in a worker process, unless pytest-timeout sets another.
_LONGEST = 300.0
_workers: dict[_Operator, CheckWorker] = {}


def _worker(op: _Operator) -> CheckWorker:
    """Return the worker process for an operator, closing the worker of the previous operator."""
    if op not in _workers:
        close_workers()
        _workers[op] = CheckWorker(functools.partial(_checks, op))
    return _workers[op]


def close_workers() -> None:
    while _workers:
        _workers.popitem()[1].close()


def planned_check(request: pytest.FixtureRequest) -> PlannedCheck:
    if not hasattr(request, "param"):
        _fail(f"{request.node.nodeid} uses torchop_check. Mark it with pytest.mark.torchop.")
    check = PlannedCheck(request.param, request.config)
    request.node.stash[_CHECK] = check
    return check


class PlannedCheck:
    """The value of the fixture `torchop_check`, which a test calls to run its check.

    The call returns the `Result` if the check passes, fails the test if the check fails, and skips
    the test if the check cannot be done.

    Attributes:
        op: the name of the operator.
        check: the name of the check, such as `"memory.transposed"`.
    """

    def __init__(self, planned: _Planned, config: pytest.Config) -> None:
        self.op, self.check, self.expected = planned.op.name, planned.check, planned.expected
        self.report: CheckReport | None = None
        self._planned, self._config, self._started = planned, config, time.time()

    def __repr__(self) -> str:
        return f"torchop_check({self.op}, {self.check})"

    def __call__(self) -> Result:
        __tracebackhide__ = True
        self.report = report = self._run()
        (result,) = report.results
        if result.outcome == "failed":
            failures = self._planned.op.failures
            first = explaining(result, failures)
            failures.append(result)
            _fail(_in_words(self.op, result, "" if first is None else first.check))
        if result.outcome != "passed":
            pytest.skip(f"{self.op}: {result.check}: {result.message}")
        return result

    def _run(self) -> CheckReport:
        op = self._planned.op
        if self._planned.problem:
            return CheckReport(op.name, "", (Result(self.check, "failed", self._planned.problem),))
        check = _checks(op)[self.check]
        report = CheckReport(op.name, str(check.subject.schema), (), check.subject.seed)
        file = getattr(self._config, "workerinput", {}).get("torchop_call")
        if file is not None:
            values = {"report": report.to_dict(), "check": check.name, "expected": self.expected}
            check = noted(check, Path(file), started=self._started, **values)
            os.ftruncate(_traceback_file(f"{file}.crash"), 0)
        elif can_fork():
            limit = self._config.getoption("timeout", None) or _LONGEST
            result = _worker(op).run(check.name, limit, math.inf)
            return dataclasses.replace(report, results=(result,))
        return dataclasses.replace(report, results=(run_check(check),))


def _in_words(op: str, result: Result, first: str = "") -> str:
    """Describe a failure. If `first` is given, it names the check that probably explains it."""
    link = f"probably for the same reason as {first}; correct that first: " if first else ""
    return f"{op}: {result.check}: {link}{result.message}\n\n{result.program}".rstrip()


def _expected_failure(result: Result, why: str) -> Result:
    message = shortened(f"{why} ({result.message})")
    return dataclasses.replace(result, outcome="expected failure", message=message)


def add_result(item: pytest.Item, report: Any) -> None:
    """Add the result of a check to pytest's report of the test.

    A test that passed without running its check is reported as failed.
    """
    check = item.stash.get(_CHECK, None)
    if check is None:  # the project overrides the fixture `torchop_check`
        return
    if check.report is None:
        if report.passed:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} did not run its check, {check.check} of {check.op}. Call "
                "torchop_check() in the test."
            )
        return
    (result,) = check.report.results
    if result.outcome == "failed" and hasattr(report, "wasxfail"):
        result = _expected_failure(result, check.expected)
    elif result.outcome == "passed" and check.expected and report.failed:  # XPASS(strict)
        message = (
            f"it was expected to fail ({check.expected}), but passed. Remove it from expected."
        )
        result = dataclasses.replace(result, outcome="failed", message=message)
        report.longrepr = _in_words(check.op, result)
    _attach(report, check.report, result)


def _attach(test_report: Any, report: CheckReport, result: Result) -> None:
    """Attach a result to pytest's report, as JSON because pytest-xdist only sends simple types."""
    found = dataclasses.replace(report, results=(result,))
    test_report.torchop = json.dumps(found.to_dict(), default=str)


# --------------------------------------------------------------------------------------------------
# Crashes in workers of pytest-xdist


@functools.cache
def _traceback_file(path: str) -> int:
    """Redirect faulthandler's tracebacks to a file, and return the file descriptor."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    faulthandler.enable(descriptor, all_threads=False)
    return descriptor


def report_crash(report: Any, worker: Any) -> None:
    """Add the result of the check to the report of a test whose worker crashed or timed out."""
    file = Path(worker.workerinput["torchop_call"])
    values = json.loads(file.read_text(encoding="utf-8"))
    limit = worker.config.getoption("timeout", None)
    # pytest-timeout starts its timer slightly before `started` is set, so a test that timed out may
    # have taken a little less than the limit. Compare with 95 % of the limit.
    hangs = limit is not None and time.time() - values["started"] > 0.95 * limit
    problem = f"took over {limit:g} seconds" if hangs else "ended the process"
    result = crashed(values["check"], file, problem)
    report.longrepr = _in_words(values["report"]["op"], result)
    if values["expected"]:
        result = _expected_failure(result, values["expected"])
        report.outcome, report.wasxfail = "skipped", values["expected"]
    _attach(report, CheckReport.from_dict(values["report"]), result)


# --------------------------------------------------------------------------------------------------
# The report


def write_report(test_reports: Sequence[Any], path: Path) -> None:
    """Write the results of all tests to a JSON file, as a list with one report per operator."""
    by_operator: dict[str, list[CheckReport]] = {}
    for test in test_reports:
        report = CheckReport.from_dict(json.loads(test.torchop))
        by_operator.setdefault(report.op, []).append(report)
    write_json([_merged(by_operator[op]).to_dict() for op in sorted(by_operator)], path)


def _merged(reports: Sequence[CheckReport]) -> CheckReport:
    results = tuple(result for report in reports for result in report.results)
    return dataclasses.replace(
        reports[0],
        schema=next((report.schema for report in reports if report.schema), reports[0].op),
        results=results,
        seconds=sum(result.seconds for result in results),
    )
