"""Calls on DTensors in two and in four processes, as `program` makes them."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.user.sharding import program

LIMIT = 600  # seconds, of which a quiet machine needs 30
PROGRAM = Path(program.__file__)


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory,
) -> functools._lru_cache_wrapper[dict[str, str]]:
    """What became of each case with a number of processes; the first test that asks runs all."""

    @functools.cache
    def run(processes: int) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(f"ranks{processes}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", str(PROGRAM), str(folder)]
        root = PROGRAM.parents[4]
        path = os.pathsep.join([str(root / "src"), str(root)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        # A session of its own: at the limit, all ranks end with the program that started them.
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as started:
            try:
                output, _ = started.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                output, _ = started.communicate()
                output += f"\n{processes} processes took more than {LIMIT} s."
        if started.returncode != 0:  # for all cases: no other test is to wait for it again
            return dict.fromkeys(cases(processes), output[-8000:])
        written: dict[str, str] = json.loads((folder / "outcomes.json").read_text())
        return written

    return run


def cases(processes: int) -> list[str]:
    return [name for name, (count, _) in program.CASES.items() if count in (0, processes)]


@pytest.mark.parametrize("name", cases(2))
def test_two_processes(outcomes: functools._lru_cache_wrapper[dict[str, str]], name: str) -> None:
    assert outcomes(2)[name] == ""


@pytest.mark.parametrize("name", cases(4))
def test_four_processes(outcomes: functools._lru_cache_wrapper[dict[str, str]], name: str) -> None:
    assert outcomes(4)[name] == ""
