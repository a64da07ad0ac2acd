"""The pytest plugin of torchop: one test for each operator and check.

pytest imports a plugin in every run of every project. It is a package beside torchop because
importing a module inside torchop imports PyTorch, which takes seconds: that happens here only when
a test asks for it. What the plugin does is in `torchop.testing.pytest_plugin`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

_MARKER = (
    "torchop(*patterns, only=None, exclude=(), examples=None, reference=None, expected=None, "
    "seed=0, rtol=None, atol=None, budget=None, allow_not_run=False): one test for each operator "
    "whose name matches a pattern, such as 'mylib::*', and for each check of "
    "torchop.testing.check; the test calls torchop_check()."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("torchop", "checks of PyTorch operators").addoption(
        "--torchop-report",
        metavar="FILE",
        help="write a report of the checks of operators: one page of HTML, or JSON if the name of "
        "FILE ends with .json",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("--torchop-report"):
        config.pluginmanager.register(_Results(config), "torchop-results")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("torchop") is None:
        return
    if "torchop_check" in metafunc.fixturenames:
        from torchop.testing import pytest_plugin  # imports PyTorch

        pytest_plugin.parametrize(metafunc)
    elif any(mark.name == "torchop" for mark in metafunc.definition.own_markers):
        pytest.fail(
            f"{metafunc.definition.nodeid} is marked with pytest.mark.torchop, but takes no "
            "argument torchop_check. Write: def test_operators(torchop_check): torchop_check()",
            pytrace=False,
        )


@pytest.fixture
def torchop_check(request: pytest.FixtureRequest) -> Any:
    """Runs the check of this test if the test is marked with `torchop`, or checks an operator.

    With the mark it takes no arguments. Without, it is called as `torchop.testing.check` is.
    """
    from torchop.testing import pytest_plugin  # imports PyTorch

    return pytest_plugin.fixture_value(request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and "torchop_check" in getattr(item, "fixturenames", ()):
        from torchop.testing import pytest_plugin  # imports PyTorch, which the test did already

        pytest_plugin.add_results(item, report)
    return report


class _Results:
    """Collects what the checks came to, also from the workers of pytest-xdist, for a report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path = config.rootpath / config.getoption("--torchop-report")
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # pytest-xdist reports a test that ended its worker as none of pytest's own phases.
        crashed = report.when not in ("setup", "call", "teardown")
        if crashed or hasattr(report, "torchop"):
            self._reports.append(report)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workerinput"):
            return  # a worker of pytest-xdist, which sends its reports
        from torchop.testing import pytest_plugin  # imports PyTorch

        self._path.parent.mkdir(parents=True, exist_ok=True)
        pytest_plugin.write_report(self._reports, self._path)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_sep("-", f"report of the operators: {self._path}")
