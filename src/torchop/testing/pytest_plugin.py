"""What the pytest plugin does: plans a test for each operator and check, runs it, and reports.

The hooks are in the package `pytest_torchop`, which does not import PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchop._accelerate import patterns
from torchop.extend import OpName
from torchop.testing._check import api
from torchop.testing._check.expected import expected_for
from torchop.testing._check.findings import Result
from torchop.testing._check.report import CheckReport, write_html, write_json
from torchop.testing._check.run import Budget, Check, plan_checks

# What `pytest.mark.torchop` passes on to `plan_checks`.
_OPTIONS = ("only", "examples", "reference", "expected", "seed", "rtol", "atol")
# What else it takes.
_OTHERS = ("exclude", "budget", "allow_not_run")
# Of these, a mapping by patterns says which operator each is for.
_BY_OPERATOR = ("examples", "reference", "expected")
# The name of the one test of an operator of which no check can be planned.
_NO_PLAN = "examples"


@dataclasses.dataclass(eq=False)
class _Operator:
    """An operator in a marked test."""

    name: str
    options: Mapping[str, Any]
    budget: Budget
    allow_not_run: bool


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
    unknown = sorted(mark.kwargs.keys() - {*_OPTIONS, *_OTHERS})
    if unknown:
        expected = ", ".join((*_OTHERS, *_OPTIONS))
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
    operator = _Operator(
        op, options, Budget(kwargs.get("budget")), bool(kwargs.get("allow_not_run"))
    )
    try:
        checks = plan_checks(op, **options)
    except Exception as error:
        yield _Planned(operator, _NO_PLAN, f"{type(error).__name__}: {error}")
        return
    # One test cannot tell whether another check of a family failed, so nothing would fail when all
    # of them begin to pass.
    pairs = [(check.name, check.expected) for check in checks if check.expected is not None]
    families = [each.name for check, each in pairs if not each.is_of_one(check)]
    if families:
        problem = f"expected={{{families[0]!r}: ...}} names several checks; name those that fail"
        yield _Planned(operator, _NO_PLAN, problem)
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

_VALUES = pytest.StashKey["PlannedCheck | AnyCheck"]()


# The checks of an operator share what they know of it, until the tests of the next one begin.
@functools.lru_cache(maxsize=1)
def _checks(op: _Operator) -> Mapping[str, Check]:
    return {check.name: check for check in plan_checks(op.name, **op.options)}


@functools.lru_cache(maxsize=1)
def _costs(op: _Operator) -> Mapping[str, float]:
    return api.call_costs(next(iter(_checks(op).values())).subject)


def fixture_value(request: pytest.FixtureRequest) -> PlannedCheck | AnyCheck:
    """The value of `torchop_check` in a test."""
    planned = getattr(request, "param", None)
    value = AnyCheck() if planned is None else PlannedCheck(planned, request.config)
    request.node.stash[_VALUES] = value
    return value


class PlannedCheck:
    """What `torchop_check` is in a marked test: called, it runs the one check of the test.

    A check that passes returns its `Result`. One that fails fails the test, with the program to
    paste, and so does one that was not run, unless that is allowed; one that cannot be done skips
    it, with the reason; one that was expected to fail is an expected failure.

    Attributes:
        op: the name of the operator.
        check: the name of the check, such as `"memory.transposed"`.
    """

    def __init__(self, planned: _Planned, config: pytest.Config) -> None:
        self.op, self.check = planned.op.name, planned.check
        self.reports: list[CheckReport] = []
        self._planned, self._config = planned, config

    def __repr__(self) -> str:
        return f"torchop_check({self.op}, {self.check})"

    def __call__(self) -> Result:
        __tracebackhide__ = True
        if self._planned.problem is not None:
            result = Result(self.check, "failed", self._planned.problem)
            report = CheckReport(self.op, "", (result,))
        else:
            op = self._planned.op
            check = _checks(op)[self.check]
            costs = _costs(op) if self._config.getoption("--torchop-report") else {}
            result = op.budget.run(check)
            schema, seed = str(check.subject.schema), check.subject.seed
            report = CheckReport(
                self.op,
                schema,
                (result,),
                seed,
                call_costs=costs,
                allow_not_run=op.allow_not_run,
            )
        self.reports.append(report)
        if result.outcome == "failed":
            _refuse(f"{self.op}: {self.check}: {result.message}\n\n{result.program}".rstrip())
        if not report.ok:
            _refuse(f"{self.op}: {self.check} was not run: {result.message}; see allow_not_run")
        if result.outcome == "expected failure":
            pytest.xfail(" ".join(result.message.split()))
        if result.outcome != "passed":
            pytest.skip(result.message)
        return result


class AnyCheck:
    """What `torchop_check` is in any other test: called as `torchop.testing.check` is.

    Its results are in the report that `--torchop-report` asks for, too.
    """

    def __init__(self) -> None:
        self.reports: list[CheckReport] = []

    def __call__(self, op: Any, *examples: Any, **options: Any) -> CheckReport:
        __tracebackhide__ = True
        raise_exception = options.pop("raise_exception", True)
        report = api.check(op, *examples, raise_exception=False, **options)
        self.reports.append(report)
        if raise_exception and not report.ok:
            _refuse(report.in_short())
        return report


def add_results(item: pytest.Item, report: Any) -> None:
    """Puts the results of a test into its report, and fails a marked test that did not check."""
    value = item.stash.get(_VALUES, None)
    if value is None:  # the fixture has another definition
        return
    if isinstance(value, PlannedCheck) and not value.reports and report.passed:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} did not run its check, {value.check} of {value.op}: call "
            "torchop_check() in the test."
        )
    # As text, because pytest-xdist sends nothing but plain values.
    report.torchop = json.dumps([each.to_dict() for each in value.reports], default=str)


# --------------------------------------------------------------------------------------------------
# The report

# The end of the name of a test that is one check, perhaps of a provider, which is all that is left
# of one that crashed.
_TEST = re.compile(r"\[([^\[\]]+::[^\[\]]+?)-([a-z_]+\.[a-z0-9_]+(?:\[[^\[\]]+\])?)\]$")


def write_report(test_reports: Sequence[Any], path: Path) -> None:
    """Writes what the tests came to: HTML, or JSON if the file is called so."""
    by_operator: dict[str, list[CheckReport]] = {}
    for test in test_reports:
        for report in _reports(test):
            by_operator.setdefault(report.op, []).append(report)
    reports = [_together(by_operator[op]) for op in sorted(by_operator)]
    if path.suffix == ".json":
        values = [report.to_dict() for report in reports]
        write_json(values, path)
    else:
        write_html(reports, path)


def _reports(test: Any) -> list[CheckReport]:
    text = getattr(test, "torchop", None)
    if text is not None:
        return [CheckReport.from_dict(values) for values in json.loads(text)]
    crashed = _TEST.search(test.nodeid)
    if crashed is None:
        return []
    op, name = crashed.groups()
    return [CheckReport(op, "", (Result(name, "failed", "the check ended the process"),))]


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
