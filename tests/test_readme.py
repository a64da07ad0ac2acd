"""The two commands of the README: the demo and the tests, as a newcomer and CI would run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, MAKEFILE, CI = (
    ROOT.joinpath(name).read_text(encoding="utf-8") for name in ("README.md", "Makefile", ".ci/run")
)


def commands(readme: str) -> list[str]:
    """The commands that the section "Try it" shows; empty if there is no such section."""
    section = re.search(r"^## Try it\n.*?^```console\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return [] if section is None else section[1].splitlines()


def test_the_readme_shows_the_demo_and_the_tests() -> None:
    assert commands(README) == ["make demo", "make test"]


def test_they_stand_on_the_first_screen() -> None:
    assert README.index("## Try it") < README.index("## Quick start")


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_make_knows_the_command(command: str) -> None:
    target = command.removeprefix("make ")
    assert re.search(rf"^{target}: \$\(STAMP\)$", MAKEFILE, re.MULTILINE)


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    test_command = commands(README)[1]
    assert test_command in CI.splitlines()


@pytest.mark.parametrize(
    "lost",
    ["# torchop\n", "## Try it\n\nNo commands.\n", "## Other\n\n```console\nmake test\n```\n"],
)
def test_a_lost_command_is_noticed(lost: str) -> None:
    assert commands(lost) == []
