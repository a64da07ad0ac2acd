"""The command line as a whole: what is wrong before a command starts, and where output goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import Outcome


def test_a_wrong_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "banana")
    outcome = Outcome("list", "aten::sin")
    assert outcome.code == 2
    assert "the environment variable TORCHOP_NATIVE is 'banana', and must be one of" in outcome.err


@pytest.mark.parametrize("option", ["--timeout", "--budget"])
@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf"])
def test_a_time_that_is_none_is_refused(option: str, seconds: str) -> None:
    outcome = Outcome("check", "aten::sin", option, seconds)
    assert outcome.code == 2
    assert f"'{option}': {float(seconds):g} is not a number of seconds above 0" in outcome.err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "schemas.json"
    done = _run("schema", "dump", "aten::sin", "-o", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"torchop: [Errno 2] No such file or directory: '{file}'\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_a_full_disk_behind_standard_output_ends_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = _run("list", "aten::sin", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "torchop: [Errno 28] No space left on device\n"


def _run(*arguments: str, stdout: object = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchop", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
