"""`make interpreters`: which Pythons it finds, and what it says of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import load_tool

tool = load_tool("interpreters")

Program = Callable[..., str]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Makes a program that answers what a Python of some version would."""
    (tmp_path / "Python.h").touch()

    def make(*version: object, include: Path = tmp_path) -> str:
        file = tmp_path / f"python-{len(list(tmp_path.iterdir()))}"
        file.write_text(f"#!/bin/sh\necho '{json.dumps([*version, str(include)])}'\n")
        file.chmod(0o700)
        return str(file)

    return make


def test_one_of_each_version_is_found_the_oldest_first(program: Program, tmp_path: Path) -> None:
    with_headers, without = program(3, 13, ""), program(3, 12, "", include=tmp_path / "none")
    refuses = tmp_path / "shim"
    refuses.write_text("#!/bin/sh\nexit 127\n")
    refuses.chmod(0o700)
    programs = [
        *(with_headers, program(3, 13, ""), program(3, 13, "t"), without, str(refuses)),
        *(program(3, 9, ""), program(2, 7, ""), program(3, 10, "")),
    ]
    found = tool.found(programs)
    assert list(map(str, found)) == ["3.10", "3.13", "3.13t"]
    assert found[1].program == with_headers
    assert found[0].include == tmp_path


def test_this_python_is_among_those_of_the_machine() -> None:
    assert tool.interpreters()[0] == sys.executable
    (this,) = tool.found([sys.executable])
    assert (3, this.minor) == sys.version_info[:2]
    assert {f"3.{this.minor}", "3.10"} <= tool.classified()


def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a script in the place of tools/environment.py."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "environment.py").write_text(script)
    monkeypatch.setattr(tool, "ROOT", tmp_path)


def python() -> object:
    (this,) = tool.found([sys.executable])
    return this


def test_python_without_this_pytorch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "ERROR: No matching distribution found for torch==9.9.0"
    environment(tmp_path, monkeypatch, f"raise SystemExit({message!r})")
    assert tool.passes(python(), "9.9.0", tmp_path)
    assert capsys.readouterr().out == f"----  Python {python()}: there is no PyTorch 9.9.0 for it\n"


def test_another_error_of_an_environment_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(tmp_path, monkeypatch, "raise SystemExit('no network')")
    assert not tool.passes(python(), "9.9.0", tmp_path)
    out = capsys.readouterr().out
    assert "no network\n" in out
    assert f"FAIL  Python {python()}: an environment with PyTorch 9.9.0\n" in out


MADE = """
import pathlib, sys
_, release, folder, name = sys.argv
program = pathlib.Path(folder, name, "bin", "python")
program.parent.mkdir(parents=True)
program.write_text("#!/bin/sh\\necho $@ >&2\\n{said}\\n")
program.chmod(0o700)
"""


@pytest.mark.parametrize("code", [0, 1])
def test_tests_that_fail_are_named_with_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    said = f"echo FAILED tests/core; echo '=== 1 failed in 2s ==='; exit {code}"
    environment(tmp_path, monkeypatch, MADE.format(said=said))
    assert tool.passes(python(), "9.9.0", tmp_path) == (code == 0)
    out, asked = capfd.readouterr()
    verdict = "FAIL" if code else "pass"
    lines = out.splitlines()
    assert lines[0] == "FAILED tests/core"
    assert lines[1] == f"{verdict}  Python {python()} with PyTorch 9.9.0: 1 failed in 2s"
    assert "tests/core tests/define tests/native tests/rules" in asked
