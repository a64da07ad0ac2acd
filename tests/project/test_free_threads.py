"""On a Python without the GIL, tests with the marker `needs_gil` must fail."""

from __future__ import annotations

import pytest

from tests._support import free_threads

pytestmark = pytest.mark.project

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.needs_gil("frees it at once")
def test_that_passes(): pass

@pytest.mark.needs_gil("frees it at once")
def test_that_fails(): raise ValueError

def test_of_any_python(): pass
"""


@pytest.mark.parametrize(
    ("has_gil", "has_to_fail", "outcomes", "lines"),
    [
        (True, True, {"passed": 2, "failed": 1}, ["FAILED *test_that_fails*"]),
        (False, False, {"passed": 1, "xpassed": 1, "xfailed": 1}, ["XPASS *test_that_passes*"]),
        (
            False,
            True,
            {"passed": 1, "failed": 1, "xfailed": 1},
            [
                "*XPASS(strict)*needs a Python with the GIL: frees it at once",
                "XFAIL *test_that_fails*needs a Python with the GIL: frees it at once",
            ],
        ),
    ],
)
def test_marked_test_must_fail_without_the_gil(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    has_gil: bool,
    has_to_fail: bool,
    outcomes: dict[str, int],
    lines: list[str],
) -> None:
    monkeypatch.setattr(free_threads, "HAS_GIL", has_gil)
    monkeypatch.setattr(free_threads, "HAS_TO_FAIL", has_to_fail)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(
        "-p", "tests._support.free_threads", "-p", "no:xdist", "-rA"
    )
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines_random(lines)
