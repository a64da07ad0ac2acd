"""A test with the marker `needs_torch` must fail on older releases of PyTorch."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.project

pytest_plugins = ["pytester"]

TESTS = """
import pytest

needs = pytest.mark.needs_torch

@needs("2.11", "is there")
def test_that_passes_here(): pass

@needs("2.11", "is there")
def test_that_fails_here(): raise ValueError

@needs("99.0", "is lacking")
def test_that_fails_for_the_reason(): raise ValueError

@needs("99.0", "holds no longer")
def test_that_passes_in_spite_of_it(): pass

@needs("2.0", "ended", before="2.10")
def test_that_fails_because_it_ended(): raise ValueError

@needs("2.0", "goes on", before="2.10")
def test_that_passes_although_it_ended(): pass

@needs("2.0", "goes on", before="99.0")
def test_that_passes_until_it_ends(): pass
"""


def test_marked_test_must_fail_on_other_releases(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "tests._support.releases", "-p", "no:xdist", "-rA")
    result.assert_outcomes(passed=2, failed=3, xfailed=2)
    result.stdout.fnmatch_lines_random(
        [
            "PASSED *test_that_passes_here",
            "PASSED *test_that_passes_until_it_ends",
            "FAILED *test_that_fails_here*",
            "FAILED *test_that_passes_in_spite_of_it*",
            "FAILED *test_that_passes_although_it_ended*",
            "*XPASS(strict)*needs PyTorch 99.0: holds no longer",
            "XFAIL *test_that_fails_because_it_ended*needs PyTorch 2.0, and older than 2.10: ended",
        ]
    )
