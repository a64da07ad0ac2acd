"""Errors that occur before a command starts, and the output of every command."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests._support.common import Outcome
from tests._support.forking import run_forked, run_module

# The code of the script `torchop`. The script itself exists only if the package is installed.
COMMAND = "import sys; from torchop.__main__ import main; sys.argv[0] = 'torchop'; sys.exit(main())"


def test_a_wrong_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "banana")
    outcome = Outcome("list", "aten::sin")
    assert outcome.code == 2
    assert "the environment variable TORCHOP_NATIVE is 'banana', and must be one of" in outcome.err


def test_wrong_environment_variable_gives_no_traceback() -> None:
    """Set the variable before the import, because `python -m torchop` imports torchop with it."""
    program = "import sys\nfrom torchop.__main__ import main\nsys.argv[1:] = ['list', 'x']\nmain()"
    done = run_forked(program, TORCHOP_NATIVE="banana")
    assert done.returncode == 2
    assert "Error: the environment variable TORCHOP_NATIVE is 'banana'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf"])
def test_invalid_time_is_rejected(seconds: str) -> None:
    outcome = Outcome("check", "aten::sin", "--timeout", seconds)
    assert outcome.code == 2
    assert f"'--timeout': {float(seconds):g} is not a number of seconds above 0" in outcome.err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "schemas.json"
    done = run_module("torchop", "schema", "dump", "aten::sin", "-o", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"torchop: [Errno 2] No such file or directory: '{file}'\n"


@pytest.mark.parametrize(
    "program", [["-m", "torchop"], pytest.param(["-c", COMMAND], marks=pytest.mark.exhaustive)]
)
def test_module_that_crashes_on_import_is_shown(program: list[str], tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text("import os\nos.abort()\n")
    done = _run("list", "crashes", program=program, folder=tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("Fatal Python error: Aborted\n")
    assert f'File "{tmp_path}/crashes.py", line 2 in <module>\n' in done.stderr


def test_module_that_exits_on_import_is_named(tmp_path: Path) -> None:
    forks = "import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n"
    (tmp_path / "ends.py").write_text(f"{forks}from os import _exit\n_exit(0)\n")
    done = run_module("torchop", "list", "ends", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    place = f"{tmp_path}/ends.py:6"
    assert done.stderr == f"Error: ends cannot be imported: it calls os._exit(0) ({place})\n"


@pytest.mark.parametrize(
    ("program", "name"), [(["-m", "torchop"], "python -m torchop"), (["-c", COMMAND], "torchop")]
)
def test_usage_names_the_command_as_it_was_called(program: list[str], name: str) -> None:
    done = _run("list", program=program)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: {name} list [OPTIONS] PACKAGE_OR_PATTERN...\n")


@pytest.mark.parametrize(
    "shell",
    ["bash", *(pytest.param(shell, marks=pytest.mark.exhaustive) for shell in ("zsh", "fish"))],
)
def test_shells_complete_the_command(shell: str) -> None:
    script = _run(program=["-c", COMMAND], _TORCHOP_COMPLETE=f"{shell}_source")
    assert script.returncode == 0
    assert f"_TORCHOP_COMPLETE={shell}_complete" in script.stdout
    words = {"COMP_WORDS": "torchop sch", "COMP_CWORD": "sch" if shell == "fish" else "1"}
    completed = _run(program=["-c", COMMAND], _TORCHOP_COMPLETE=f"{shell}_complete", **words)
    assert "schema" in completed.stdout
    assert "bench" not in completed.stdout


def _run(
    *arguments: str,
    program: Sequence[str] = ("-m", "torchop"),
    folder: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    option, text = program
    run = run_module if option == "-m" else run_forked
    return run(text, *arguments, folder=folder, **environment)
