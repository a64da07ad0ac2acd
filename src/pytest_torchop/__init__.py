"""The pytest plugin of torchop. It generates tests, or checks operators with calls from tests.

pytest imports all installed plugins, even in projects that do not use them, and importing torchop
takes seconds. The plugin is therefore a separate package that imports
`torchop.testing.pytest_plugin` only when a test needs it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_MARKER = (
    "torchop(*patterns, only=None, exclude=(), examples=None, reference=None, expected=None, "
    "seed=0, rtol=None, atol=None): one test for each operator "
    "whose name matches a pattern, such as 'mylib::*', and for each check of "
    "torchop.testing.check; the test calls torchop_check()."
)

# The stash key of a temporary folder with one file per pytest-xdist worker. Each worker writes the
# current call to this file.
_FOLDER = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchop", "checks of PyTorch operators")
    group.addoption(
        "--torchop-report",
        metavar="FILE",
        help="write the results of the checks of operators as JSON",
    )
    group.addoption(
        "--torchop-check",
        metavar="PATTERN",
        action="append",
        default=[],
        help="after the tests, check the operators whose names match, such as 'mylib::*', with "
        "the calls of the tests as examples (repeatable)",
    )
    group.addoption(
        "--torchop-check-only",
        metavar="CHECK",
        action="append",
        default=[],
        help="run only these checks: a name, a family or a pattern (repeatable)",
    )
    group.addoption(
        "--torchop-check-budget",
        metavar="SECONDS",
        type=float,
        default=5.0,
        help="the time limit of the checks of each operator (5 by default)",
    )
    group.addoption(
        "--torchop-baseline",
        metavar="FILE",
        help="a JSON file of known failures; a run without the file writes it, and still fails",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("--torchop-report"):
        config.pluginmanager.register(_Results(config), "torchop-results")
    if not config.getoption("--torchop-check"):
        for option in ("--torchop-check-only", "--torchop-check-budget", "--torchop-baseline"):
            if _is_on_command_line(config, option):
                raise pytest.UsageError(
                    f"{option} has no effect without --torchop-check. Add the operators to check, "
                    "such as --torchop-check 'mylib::*'."
                )
    if config.getoption("--torchop-check") and not config.getoption("collectonly"):
        from torchop.testing._suite import Suite  # imports PyTorch

        config.pluginmanager.register(Suite(config), "torchop-suite")
    if "TORCHOP_RECORD_FOLDER" in os.environ and hasattr(config, "workerinput"):
        from torchop.testing._suite import Recording  # imports PyTorch

        config.pluginmanager.register(Recording(config), "torchop-recording")


def _is_on_command_line(config: pytest.Config, option: str) -> bool:
    """Return whether the command gives an option, rather than `addopts` of the project.

    An option in `addopts` applies to all runs, even to those that do not use it.
    """
    return any(str(arg).partition("=")[0] == option for arg in config.invocation_params.args)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the name of a file to each pytest-xdist worker.

    The worker writes each call to this file before making it. If the worker crashes,
    `pytest_handlecrashitem` then reports the call.
    """
    folder = node.config.stash.get(_FOLDER, None)
    if folder is None:
        temporary = tempfile.TemporaryDirectory(prefix="torchop-")
        node.config.add_cleanup(temporary.cleanup)
        folder = node.config.stash[_FOLDER] = Path(temporary.name)
    node.workerinput["torchop_call"] = str(folder / node.gateway.id)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """Add the crashed call to the report of a test whose pytest-xdist worker crashed or hung."""
    worker: Any = report.node
    if Path(worker.workerinput["torchop_call"]).exists():
        from torchop.testing import pytest_plugin  # imports PyTorch

        pytest_plugin.report_crash(report, worker)


def pytest_unconfigure() -> None:
    """Close the worker process that ran the checks, if there is one."""
    plugin = sys.modules.get("torchop.testing.pytest_plugin")
    if plugin is not None:
        plugin.close_workers()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("torchop") is None:
        return
    if "torchop_check" in metafunc.fixturenames:
        from torchop.testing import pytest_plugin  # imports PyTorch

        pytest_plugin.parametrize(metafunc)
    elif any(mark.name == "torchop" for mark in metafunc.definition.own_markers):
        pytest.fail(
            f"{metafunc.definition.nodeid} is marked with pytest.mark.torchop, but has no "
            "argument torchop_check. Write: def test_operators(torchop_check): torchop_check()",
            pytrace=False,
        )


@pytest.fixture
def torchop_check(request: pytest.FixtureRequest) -> Any:
    """A function that runs the check of this test. The test must be marked with `torchop`."""
    from torchop.testing import pytest_plugin  # imports PyTorch

    return pytest_plugin.planned_check(request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    # pytest's own wrappers run inside this one, so they have already applied xfail marks to the
    # report.
    report = yield
    if call.when == "call" and "torchop_check" in getattr(item, "fixturenames", ()):
        from torchop.testing import pytest_plugin  # already imported by the test

        pytest_plugin.add_result(item, report)
    return report


class _Results:
    """Collect the results of all tests, and write them to the file from `--torchop-report`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path = config.rootpath / config.getoption("--torchop-report")
        self._reports: list[Any] = []

    @pytest.hookimpl(tryfirst=True)  # before other plugins deselect tests
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        if hasattr(self._config, "workerinput") or self._config.getoption("--torchop-check"):
            return
        if session.testsfailed or not _is_on_command_line(self._config, "--torchop-report"):
            return  # pytest reports errors of the collection, which may explain missing tests
        if not any("torchop_check" in getattr(item, "fixturenames", ()) for item in items):
            raise pytest.UsageError(
                "--torchop-report has no effect, because no test has the mark torchop. Add the "
                "operators to check, such as --torchop-check 'mylib::*'."
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "torchop"):
            self._reports.append(report)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workerinput"):
            return  # in a pytest-xdist worker; only the controller writes the file
        from torchop.testing import pytest_plugin  # imports PyTorch

        self._path.parent.mkdir(parents=True, exist_ok=True)
        pytest_plugin.write_report(self._reports, self._path)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        empty = "" if self._reports else " (empty, because no check ran)"
        terminalreporter.write_sep("-", f"report of the operators: {self._path}{empty}")
