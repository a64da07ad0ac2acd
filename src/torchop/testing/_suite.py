"""The plugins for `pytest --torchop-check` and for `record -m pytest` with pytest-xdist."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import torchop
from torchop._accelerate import patterns
from torchop.testing._check.run import no_such_check
from torchop.testing._from_tests import Baseline, check_calls, families, names_check
from torchop.testing._suite_calls import SuiteCalls


class Suite:
    """Record the calls of all tests, then check the operators and report the results as tests.

    With pytest-xdist, each worker process saves its calls in a folder. The controller does not
    import the tests, so the last worker to finish checks the operators and sends the results to
    the controller.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._patterns = tuple(config.getoption("--torchop-check"))
        self._only = tuple(config.getoption("--torchop-check-only"))
        self._budget = config.getoption("--torchop-check-budget")
        try:
            patterns.check_patterns("--torchop-check", self._patterns)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        for name in self._only:
            if not names_check(name):
                raise pytest.UsageError(f"--torchop-check-only {name}: {no_such_check(name)}")
        if not self._budget > 0:
            raise pytest.UsageError("--torchop-check-budget must be a number above 0.")
        path = config.getoption("--torchop-baseline")
        try:
            self._baseline = Baseline(None if path is None else config.rootpath / path)
        except ValueError as error:
            raise pytest.UsageError(f"--torchop-baseline {path}: {error}") from None
        self._calls = SuiteCalls(self._patterns)
        self._notes: list[str] = []
        self._received: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._calls.start()
        try:
            return (yield)
        finally:
            self._calls.stop()

    # ----------------------------------------------------------------------------------------------
    # Workers of pytest-xdist

    def pytest_sessionfinish(self) -> None:
        given = getattr(self._config, "workerinput", None)
        if given is None:
            return
        call_file = Path(given["torchop_call"])
        self._calls.save(call_file.with_suffix(".calls"))
        saved = list(call_file.parent.glob("*.calls"))
        if len(saved) < given["workercount"]:
            return
        try:  # two workers may finish at the same time, so only one may claim the checks
            call_file.with_name("claimed").touch(exist_ok=False)
        except FileExistsError:
            return
        for path in saved:
            self._calls.update(path)
        output: Any = self._config
        output.workeroutput["torchop_checks"] = json.dumps([list(self._tested()), self._notes])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        text = getattr(node, "workeroutput", {}).get("torchop_checks")
        if text is not None:
            self._received, self._notes = json.loads(text)

    # ----------------------------------------------------------------------------------------------
    # The controller, or the only process

    # Use `trylast`, so that pytest's terminal reporter finishes its progress output only after
    # these results.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        if not hasattr(self._config, "workerinput"):
            is_distributed = self._config.pluginmanager.hasplugin("dsession")
            results: Iterable[dict[str, Any]] = self._received if is_distributed else self._tested()
            if is_distributed and not self._received:
                problem = "no worker of pytest-xdist ran the checks, because some crashed"
                results = [_failure("torchop", problem)]
            before = session.testscollected
            pairs = itertools.pairwise(itertools.chain(results, [None]))
            for number, (tested, following) in enumerate(pairs, before + 1):
                # pytest prints the percentage of collected tests that have finished, and treats 100
                # % as the end of the run. So if another result follows, count that result as
                # collected, to keep the percentage below 100.
                session.testscollected = number + (following is not None)
                self._log(cast(dict[str, Any], tested))
        return result

    def _tested(self) -> Iterator[dict[str, Any]]:
        """Yield a dict that pytest-xdist can send, for each operator and family of checks."""
        path, baseline = self._config.getoption("--torchop-baseline"), self._baseline
        calls, reports = self._calls.calls, []
        for report in check_calls(calls, only=self._only, budget=self._budget, baseline=baseline):
            reports.append(report)
            for family in families(report):
                yield family.tested()
        baseline.save()
        for pattern in self._patterns:
            matching = [name for name in patterns.all_names() if patterns.is_match(name, pattern)]
            if not any(str(name) in calls for name in matching):
                problem = patterns.why_nothing_matches("--torchop-check", pattern)
                problem = problem or f"no test calls an operator that matches {pattern!r}."
                yield _failure(pattern, problem)
            elif uncalled := sorted(str(name) for name in matching if str(name) not in calls):
                self._notes.append(f"not called by any test: {', '.join(uncalled)}")
        for fixed in baseline.fixed(reports):
            self._notes.append(f"passes now, so remove it from {path}: {fixed}")
        if baseline.is_new:
            self._notes.append(
                f"wrote the failures to {path}. The next run with it accepts them, and passes."
            )

    def _log(self, tested: dict[str, Any]) -> None:
        """Report a result to pytest as a test: one report each for setup, call and teardown."""
        namespace, _, name = tested["name"].partition("::")
        nodeid = f"torchop-check::{namespace}::{name}"
        location = ("torchop-check", None, f"{namespace}.{name}")
        hook = self._config.hook
        hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
        for when in ("setup", "call", "teardown"):
            is_expected = tested["outcome"] == "xfailed"
            outcome: Any = tested["outcome"] if when == "call" else "passed"
            text: Any = tested["text"] or None if when == "call" else None
            if outcome == "skipped":
                text = ("torchop-check", 0, f"Skipped: {tested['name']}: {text}")
            report: Any = pytest.TestReport(
                nodeid,
                location,
                {nodeid: 1},
                outcome,
                text,
                when,
                duration=tested["seconds"] if when == "call" else 0.0,
            )
            if is_expected and when == "call":
                report.outcome, report.wasxfail = "skipped", tested["text"]
            if when == "call" and "torchop" in tested:
                report.torchop = tested["torchop"]
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for note in self._notes:
            terminalreporter.write_line(f"torchop: {note}")


def _failure(name: str, problem: str) -> dict[str, Any]:
    return {"name": f"{name}[calls]", "outcome": "failed", "text": problem, "seconds": 0.0}


class Recording:
    """Record all calls in a pytest-xdist worker, for `python -m torchop record -m pytest -n`.

    The command sets TORCHOP_RECORD_FOLDER and TORCHOP_RECORD_PATTERNS, and reads the files that the
    workers save.
    """

    def __init__(self, config: Any) -> None:
        wanted = json.loads(os.environ["TORCHOP_RECORD_PATTERNS"])
        folder = Path(os.environ["TORCHOP_RECORD_FOLDER"])
        self._recorded = torchop.record(*wanted)
        self._path = folder / f"{config.workerinput['workerid']}-{os.getpid()}.json"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._recorded.__enter__()
        try:
            return (yield)
        finally:
            with warnings.catch_warnings():
                # `torchop record` reports patterns that match nothing, so do not warn in every
                # worker.
                warnings.simplefilter("ignore", torchop.NothingToAccelerateWarning)
                self._recorded.__exit__(None, None, None)

    def pytest_sessionfinish(self) -> None:
        self._recorded.save(self._path)
