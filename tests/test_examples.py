"""The examples and the demo, each run as its reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO = EXAMPLES / "crop_demo.py"


def run(script: Path, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, f"{script.name} exited with {process.returncode}:\n" + (
        process.stdout
    )
    return process.stdout


@pytest.mark.parametrize(
    "script",
    [script for script in sorted(EXAMPLES.glob("*.py")) if script != DEMO],
    ids=lambda script: script.stem,
)
def test_example_runs_and_prints_a_result(script: Path) -> None:
    assert run(script).strip()


def test_demo_passes_every_step_and_shows_pictures_and_costs(tmp_path: Path) -> None:
    shown = run(DEMO, "--output", str(tmp_path), "--rounds", "2")
    for step in ("eager", "torch.compile", "torch.export", "backward", "opcheck"):
        assert f"ok  {step}" in shown
    sizes = {"photo.png": (512, 600), "crop.png": (250, 300), "gradient.png": (512, 600)}
    for name, size in sizes.items():
        with Image.open(tmp_path / name) as picture:
            assert picture.size == size
    with Image.open(tmp_path / "gradient.png") as gradient:
        white = sorted(gradient.getcolors(), key=lambda color: color[1])[-1]
        assert white == (250 * 300, (255, 255, 255))
        assert len(gradient.getcolors()) == 2
    for row in ("14 tensors", "grad, 14 leaves", "1 tensor", "grad, 1 leaf", "are native"):
        assert row in shown
    assert "\x1b" not in shown, "colours in a pipe"


def test_demo_fails_when_a_step_fails(tmp_path: Path) -> None:
    # A box that reaches out of the photograph: what PIL fills in is not what slicing leaves out.
    broken = "import sys, crop_demo\ncrop_demo.BOX = (0, 0, 900, 900)\nsys.exit(crop_demo.main())\n"
    process = subprocess.run(
        [sys.executable, "-c", broken, "--output", str(tmp_path), "--rounds", "1"],
        cwd=EXAMPLES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 1, process.stdout
    assert "FAILED  eager" in process.stdout
    assert "ok  opcheck" in process.stdout, "the other steps still run"
