"""Run the cases of `program.py` in two and in four processes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests._support.forking import run_compiling
from tests.rules.user.sharding import program

LIMIT = 600  # in seconds; an idle machine needs 30
PROGRAM = Path(program.__file__)

# Start the ranks like torchrun, but by forking a process that has imported PyTorch and DTensor, to
# import these only once. Each rank imports torchop and defines the operators itself.
RANKS = """
    import os, runpy, signal, sys
    import torch.distributed.tensor

    program, folder, count, limit, *path = sys.argv[1:]
    ranks = set()
    for rank in range(int(count)):
        child = os.fork()
        if child == 0:
            signal.alarm(int(limit))
            os.environ.update(RANK=str(rank), WORLD_SIZE=count)
            sys.path[:0] = path
            sys.argv[:] = [program, folder]
            runpy.run_path(program, run_name="__main__")
            sys.exit()
        ranks.add(child)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for rank in ranks:  # the other ranks would wait for the failed one
                os.kill(rank, signal.SIGKILL)
            sys.exit(f"A rank ended with {os.waitstatus_to_exitcode(status)}.")
"""


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory,
) -> functools._lru_cache_wrapper[dict[str, str]]:
    """Return a function that maps each case to its error, or to "" if the case passed.

    The first call for a number of processes runs all cases. Later calls return the same outcomes.
    """

    @functools.cache
    def run(processes: int) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(f"ranks{processes}")
        root = PROGRAM.parents[4]
        arguments = [PROGRAM, folder, processes, LIMIT, root / "src", root]
        ended = run_compiling(RANKS, *map(str, arguments), timeout=LIMIT + 60)
        # If the program itself fails, report this for every case, so that it does not run again.
        if ended.returncode != 0:
            return dict.fromkeys(cases(processes), (ended.stdout + ended.stderr)[-8000:])
        written: dict[str, str] = json.loads((folder / "outcomes.json").read_text())
        return written

    return run


def cases(processes: int) -> list[str]:
    return [name for name, (count, _) in program.CASES.items() if count in (0, processes)]


@pytest.mark.parametrize("name", cases(2))
def test_two_processes(outcomes: functools._lru_cache_wrapper[dict[str, str]], name: str) -> None:
    assert outcomes(2)[name] == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", cases(4))
def test_four_processes(outcomes: functools._lru_cache_wrapper[dict[str, str]], name: str) -> None:
    assert outcomes(4)[name] == ""
