"""The marker of tests that a Python without the GIL cannot pass: such a test has to fail there."""

from __future__ import annotations

import pytest

from tests import free_threads

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
    ("has_gil", "outcomes", "lines"),
    [
        (True, {"passed": 2, "failed": 1}, ["FAILED *test_that_fails*"]),
        (
            False,
            {"passed": 1, "failed": 1, "xfailed": 1},
            [
                "*XPASS(strict)*needs a Python with the GIL: frees it at once",
                "XFAIL *test_that_fails*needs a Python with the GIL: frees it at once",
            ],
        ),
    ],
)
def test_a_marked_test_has_to_fail_without_the_gil(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    has_gil: bool,
    outcomes: dict[str, int],
    lines: list[str],
) -> None:
    monkeypatch.setattr(free_threads, "HAS_GIL", has_gil)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "tests.free_threads", "-p", "no:xdist", "-rA")
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines_random(lines)
