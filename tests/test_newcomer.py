"""A newcomer's path: the commands and the program of the front page, as they stand.

From a copy of the sources to an operator that compiles and trains. What the machine has stays out
of reach, apart from PyTorch and what builds a wheel, which nobody has to download for a test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import venv
from collections.abc import Callable
from pathlib import Path

import hatchling
import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[1]
NOT_IN_A_CLONE = (".*", "_build", "__pycache__", "*.egg-info")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "torchop"
    # Notebooks that are tested meanwhile have sockets here, which cannot be copied.
    left_out = shutil.ignore_patterns(*NOT_IN_A_CLONE, "kernel-ipc-*")
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A fresh virtual environment, activated, that has PyTorch and nothing of ours."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    [packages] = (folder / "lib").glob("python*/site-packages")
    there = {str(Path(module.__file__ or "").parents[1]) for module in (hatchling, np, torch)}
    (packages / "torch.pth").write_text("\n".join(sorted(there)) + "\n")
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's word for "without"
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def front_page() -> tuple[list[str], str]:
    """Its commands, and its program."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    fences = [token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"]
    commands = [fence.content for fence in fences if fence.info == "console"]
    [program] = [fence.content for fence in fences if fence.info == "python"]
    [output] = [fence.content for fence in fences if fence.info == "output"]
    return commands, f"{program}assert str(x.grad) == {output.strip()!r}\n"


def test_front_page_leads_to_an_operator_that_compiles_and_trains(
    clone: Path, environment: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    def run(command: str, folder: Path) -> None:
        process = subprocess.run(
            ["sh", "-ec", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        assert process.returncode == 0, f"{command}\n{process.stdout}"

    commands, program = front_page()
    assert any("pip install" in command for command in commands)
    elsewhere = clone.parent / "work"
    elsewhere.mkdir()
    with pytest.raises(AssertionError, match="No module named 'torchop'"):
        run("python -c 'import torchop'", elsewhere)
    start = time.perf_counter()
    for command in commands:
        run(command, clone)
    (elsewhere / "first.py").write_text(program)
    run("python first.py", elsewhere)
    record_property("seconds", round(time.perf_counter() - start, 1))
