"""Child processes of `torchop check` can use the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.device import target

ROOT = Path(__file__).parents[3]
LOAD = "from tests.integration.device import standin\nstandin.load()\n" if target.IS_STANDIN else ""
# Code of a module that asks for the device when it is imported. Afterwards a forked process cannot
# use the device, as with CUDA, so `torchop check` must start its child processes without a fork.
ASK = (
    "process = os.getpid()\ntorch.standin._is_in_bad_fork = lambda: os.getpid() != process\n"
    if target.IS_STANDIN
    else f"there_is_one = torch.get_device_module({target.TYPE!r}).is_available()\n"
)
MODULES = {"asks": f"{LOAD}import os\nimport torch\n{ASK}", "does not ask": LOAD}
PROGRAM = f"""
import torch

def answers():
    yield torch.get_device_module({target.TYPE!r})._is_in_bad_fork()
    yield torch.ones(2, device={target.FIRST!r}).sum().item()

if __name__ == "__main__":
    {LOAD.strip().replace(chr(10), "; ") or "pass"}
    from torchop.cli.child_process import answers_of, preload

    preload(["module"])
    with answers_of(answers, (), 60, ["module"]) as messages:
        print(list(messages))
"""


@target.needs_accelerator
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_process_can_use_the_device_after_any_import(module: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(module)
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.stdout, run.returncode) == ("[False, 2.0]\n", 0), run.stderr
