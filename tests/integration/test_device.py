"""Run the tests of `device/` in a child process, because a process cannot unload their device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "device"


@pytest.mark.project  # a slow test, which `nox -s device` runs alone
def test_device() -> None:
    run(str(FOLDER))


@pytest.mark.project  # slow, because it compiles the device
def test_other_tests_with_their_tensors_on_the_device() -> None:
    file = str(FOLDER.parents[1] / "testing" / "test_checking.py")
    assert "xfailed" in run("-p", "tests._support.on_device", file, TORCHOP_TEST_DEVICE="standin:1")


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=FOLDER.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
