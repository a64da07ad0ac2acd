"""What the first `make` shows while it installs PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import load_tool

install = load_tool("install")


Pip = Callable[[str], tuple[int, str]]


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Pip:
    """Installs with a shell script in place of pip; returns the exit code, and what is shown."""

    def run(script: str) -> tuple[int, str]:
        def create(folder: Path, **options: object) -> None:
            (folder / "lib/python3/site-packages").mkdir(parents=True)
            (folder / "bin").mkdir()
            python = folder / "bin" / "python"
            python.write_text(f"#!/bin/sh\n{script}\n")
            python.chmod(0o755)

        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(install.venv, "create", create)
            patch.setattr(sys, "argv", ["install.py", "venv"])
            patch.setattr(install, "SECONDS", 0.2)
            return install.main(), capsys.readouterr().out

    return run


WORK = """
echo "Looking in indexes: https://example.org/simple"
echo "WARNING: Location is ignored: it is neither a file nor a directory."
echo "Collecting torch==2.13.0 (from -r requirements/torch.txt (line 2))"
echo "  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (180.5 MB)"
echo "  Downloading click-8.5.1-py3-none-any.whl (126 kB)"
echo "  WARNING: Retrying (Retry(total=4)) after connection broken"
sleep 0.5
echo "Installing collected packages: torch, click"
cd venv/lib/python3/site-packages
mkdir -p torch-2.13.0.dist-info
head -c 3000000 /dev/zero > torch-2.13.0.dist-info/file
sleep 0.5
mkdir -p click-8.5.1.dist-info
"""


def test_lines_say_what_happens_with_times_and_sizes(pip: Pip) -> None:
    code, shown = pip(WORK)
    assert code == 0
    assert "\r" not in shown
    lines = shown.splitlines()
    assert all(line[5:9] == " s  " and line[:5].strip().isdigit() for line in lines)
    texts = list(dict.fromkeys(line[9:].strip() for line in lines))
    assert texts[0].startswith("1 of 3: a virtual environment, with Python 3.")
    assert texts[1:8] == [
        "2 of 3: PyTorch, and what the tests need, from requirements/",
        "downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl, 180 MB",
        "WARNING: Retrying (Retry(total=4)) after connection broken",
        "packages: 2 found, 181 MB",
        "packages: unpacking 2, 181 MB",
        "packages: 1 of 2 unpacked, 3 MB",
        "3 of 3: torchop, as it stands in this folder; its C++ is compiled later",
    ]
    assert texts[-1] == "installed: 2 packages, 3 MB"


def test_a_failure_shows_what_pip_said_and_fails(pip: Pip) -> None:
    code, shown = pip("echo first; echo 'ERROR: No matching distribution found' >&2; exit 7")
    assert code == 7
    assert "  ERROR: No matching distribution found\n" in shown
    assert "pip failed with exit code 7. This is the end of what it said:\nfirst\nERROR: " in shown
    assert "3 of 3" not in shown


def test_local_files_have_their_size(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0-cp311-cp311-linux_x86_64.whl"
    with wheel.open("wb") as file:
        file.truncate(180_000_000)
    said = [f"Processing {wheel} (from -r requirements/torch.txt (line 2))", None]
    assert list(install.progress(iter(said), tmp_path)) == [
        f"processing {wheel.name}, 180 MB",
        "packages: 1 found, 180 MB",
    ]


def test_it_needs_nothing_but_python() -> None:
    command = [sys.executable, "-I", "-S", "-c", "import runpy, sys; runpy.run_path(sys.argv[1])"]
    subprocess.run([*command, install.__file__], check=True, env=dict(os.environ))
