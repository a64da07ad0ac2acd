"""Notices that torchop prints while it compiles the extension. Uses private names."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

import torchop
from tests._support.common import assert_clean, needs_native, without_notes_of_pytorch
from tests._support.forking import run_compiling, run_forked
from tests.native.conftest import Environment
from torchop._native.extension.api import NOTICE, NOTICE_IN_BACKGROUND

pytestmark = needs_native

READY = re.compile(r"torchop: native calls are ready, after \d+ s\.")
# Writes incomplete lines, like a progress bar, which a notice must not interrupt.
PROGRAM = """
import os
import sys
import time

import torch
import torchop

@torchop.custom_op("noticed::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x + 1

for step in range(10):
    print(f"step {step}", end=" ", flush=True)
    for _ in range(100 if step else 1000):
        op(torch.zeros(2))
    time.sleep(0.1)
    print("loss 0.5", flush=True)
print(torchop.native.wait())
"""
SHOWN = [*(f"step {step} loss 0.5" for step in range(10)), "True"]


@pytest.fixture
def environment(child_environment: Environment) -> dict[str, str]:
    """Return environment variables that select a slow fake compiler.

    Instead of compiling, the fake compiler copies the extension that this process has loaded.
    """
    return child_environment(
        'while [ "$1" != "-o" ]; do shift; done\nsleep 0.4\n'
        f'cp "{torchop.native.status().path}" "$2"'
    )


def test_in_a_log(environment: dict[str, str]) -> None:
    done = run_forked(PROGRAM, **environment)
    notice, ready = done.stderr.splitlines()
    assert notice == NOTICE_IN_BACKGROUND
    assert READY.fullmatch(ready)
    assert done.stdout.splitlines() == SHOWN
    assert assert_clean(run_forked(PROGRAM, **environment)).splitlines() == SHOWN


@pytest.mark.exhaustive
def test_in_a_notebook(environment: dict[str, str]) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    setting = f"import os; os.environ.update({environment!r})"
    new = nbformat.v4.new_code_cell
    notebook = nbformat.v4.new_notebook(cells=[new(setting), new(PROGRAM)])
    client = nbclient.NotebookClient(notebook, timeout=120, record_timing=False)
    client.create_kernel_manager().transport = "ipc"
    client.execute()
    written = {"stdout": "", "stderr": ""}
    for output in notebook.cells[1].outputs:
        written[output.name] += output.text
    assert written["stdout"].splitlines() == SHOWN
    notice, ready = without_notes_of_pytorch(written["stderr"]).splitlines()
    assert notice == NOTICE_IN_BACKGROUND
    assert READY.fullmatch(ready)


def test_failed_build_is_reported_once_per_process(environment: dict[str, str]) -> None:
    compiler = Path(environment["CXX"])
    compiler.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    without_waiting = PROGRAM.replace("print(torchop.native.wait())", "")
    done = run_compiling(without_waiting, **environment)
    assert done.returncode == 0, done.stderr
    notice, warning = without_notes_of_pytorch(done.stderr).split("\n", 1)
    assert notice == NOTICE_IN_BACKGROUND
    assert warning.count("no space left") == 1
    assert "NativeBuildWarning: torchop's native call path is not available" in warning


def test_timed_calls_are_native_from_the_first(environment: dict[str, str]) -> None:
    program = """
    import torch, torchop
    from torchop.testing._timing import Way, timed

    calls = []

    @torchop.custom_op("noticed::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x + 1

    x = torch.zeros(2)
    assert torchop.native.status().state == "idle"
    timed({"way": Way(lambda: lambda: op(x))}, (x,), 0.01)
    assert torchop.native.counters(op) == {"native": len(calls)}
    """
    done = run_forked(textwrap.dedent(program), **environment)
    assert done.returncode == 0, done.stderr
    assert NOTICE in done.stderr


def test_forked_processes_wait_for_themselves(environment: dict[str, str]) -> None:
    program = """
    import json, os, signal
    import torch, torchop

    @torchop.custom_op("noticed::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def is_native():
        is_there = torchop.native.wait()
        before = torchop.native.counters(op).get("native", 0)
        op(torch.zeros(2))
        return is_there and torchop.native.counters(op)["native"] == before + 1

    assert not torchop.native.wait(0)
    assert torchop.native.status().state == "building"
    codes = []
    for _ in range(2):  # fork during the build, and after it
        process = os.fork()
        if process == 0:
            signal.alarm(60)
            os._exit(not is_native())
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        assert is_native()
    print(json.dumps(codes))
    """
    done = run_forked(textwrap.dedent(program), **environment)
    assert (done.returncode, done.stdout) == (0, json.dumps([0, 0]) + "\n"), done.stderr
