"""The README shows the two commands that new users need, and CI runs them."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch._dynamo

import torchop
import torchop.testing
from tests._support import common

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = ["make demo", "make test"]


def commands(section: str) -> list[str]:
    """Return the lines of the console blocks in a section of the README."""
    text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [
        line
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]


def planned(command: str, tmp_path: Path) -> list[str]:
    """Return the commands that `make` would run in a new clone of the repository."""
    done = subprocess.run(
        [*command.split(), "--dry-run", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_readme_shows_demo_and_tests() -> None:
    assert commands("Try it") == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_states_requirements_and_times(command: str) -> None:
    section = README.partition("\n## Try it\n")[2].partition("\n## ")[0]
    assert f"`{command}`" in section
    for needed in ("Python 3.10", "C++ compiler", "no GPU"):
        assert needed in section
    assert len(re.findall(r"\d+ (?:seconds|minutes)", section)) >= 2


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_demo_installs_only_what_it_needs(tmp_path: Path) -> None:
    lines = planned("make demo", tmp_path)
    assert any("requirements/demo.txt" in line for line in lines)
    assert not any("requirements/dev.txt" in line for line in lines)
    assert lines[-1].endswith("bin/python examples/crop_demo.py")


def test_tests_compile_native_calls_first(tmp_path: Path) -> None:
    compiling, tests = planned("make test", tmp_path)[-2:]
    assert "torchop.native.wait()" in compiling
    assert "-m pytest" in tests


PAGES = sorted({*ROOT.glob("*.md"), *common.PAGES})


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_errors_named_in_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = set(re.findall(r"`(?:torchop\.)?([A-Z]\w+(?:Error|Warning))`", text))
    modules = (torchop, torchop.testing, torchop.native, builtins, torch._dynamo.exc, subprocess)
    assert not {name for name in names if not any(hasattr(module, name) for module in modules)}
