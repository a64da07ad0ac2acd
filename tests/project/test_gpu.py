"""Those parts of `nox -s gpu` that can be tested without a GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from tools import gpu

from tests._support import on_device

pytestmark = pytest.mark.project


def test_parts_name_existing_files(tmp_path: Path) -> None:
    parts = {part.name: part for part in gpu.parts("cuda:0", tmp_path)}
    assert {"scenarios", "marked", "anywhere", "benchmark", "page_gpu_kernels"} <= set(parts)
    assert set(parts) - {"anywhere"} == {part.name for part in gpu.parts("cpu", tmp_path)}
    named = [each for part in parts.values() for each in part.command]
    paths = [path for path in named if path.startswith(("tests/", "bench"))]
    paths += [f"tests/{folder}" for folder in on_device.FOLDERS]
    assert len(paths) > 10
    assert [path for path in paths if not (gpu.ROOT / path).exists()] == []
    assert "import torchop" in (tmp_path / "page_gpu_kernels.py").read_text()


@pytest.mark.parametrize(
    ("program", "status", "last"),
    [
        ("import os; print(os.environ['TORCHOP_TEST_DEVICE'])", "passed", "cuda:0"),
        ("print('so far'); exit(3)", "failed with exit code 3", "so far"),
        ("import time; print('on', flush=True); time.sleep(60)", "stopped after 3 s", "on"),
    ],
)
def test_part_that_fails_or_hangs_is_reported(
    program: str, status: str, last: str, tmp_path: Path
) -> None:
    part = gpu.Part("part", 3, (sys.executable, "-c", program))
    outcome = gpu.run(part, "cuda:0", tmp_path, time.monotonic() + 60)
    assert (outcome.status, outcome.last) == (status, last)


def test_part_does_not_start_without_enough_time(tmp_path: Path) -> None:
    part = gpu.Part("part", 3, (sys.executable, "-c", "print('run')"))
    outcome = gpu.run(part, "cuda:0", tmp_path, time.monotonic() + 5)
    assert (outcome.status, outcome.last) == ("not run: no time left", "")


def test_parts_that_measure_run_alone(tmp_path: Path) -> None:
    stages = gpu.stages(gpu.parts("cuda:0", tmp_path))
    alone = {part.name for stage in stages if len(stage) == 1 for part in stage}
    assert {"build", "benchmark", "anywhere"} <= alone
    assert {"scenarios", "marked", "page_gpu_kernels"} <= {part.name for part in stages[2]}


def test_factories_called_by_tests_use_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = on_device._on_device(torch.ones, torch.device("meta"))
    assert ones(2).device.type == "meta"
    assert ones(2, device="cpu").device.type == "cpu"
    assert ones(2, layout=torch.strided).device.type == "meta"
    into = torch.empty(2)
    assert ones(2, out=into) is into
    monkeypatch.setattr(on_device, "TESTS", "/elsewhere")  # as if this file were not a test
    assert ones(2).device.type == "cpu"
