"""The examples and the demo run without errors."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_compiling, run_forked, run_module, run_script

pytestmark = pytest.mark.project

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "crop_demo.py"
ON_RANKS = EXAMPLES / "tensor_parallel.py"  # rules/user/sharding/program.py tests it


def run(script: Path, *arguments: str) -> str:
    process = run_script(script, *arguments)
    shown = process.stdout + process.stderr
    assert process.returncode == 0, f"{script.name} exited with {process.returncode}:\n{shown}"
    return shown


# Maps an example to the package that it needs besides torchop.
NEEDS = {"nanobind_kernel": "nanobind", "tvm_ffi_kernel": "tvm_ffi"}


@pytest.mark.parametrize(
    "script",
    [script for script in sorted(EXAMPLES.glob("*.py")) if script not in (DEMO, ON_RANKS)],
    ids=lambda script: script.stem,
)
def test_example_runs_and_prints_a_result(script: Path) -> None:
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem], reason=f"{NEEDS[script.stem]} is not installed")
    assert run(script).strip()


def test_operators_of_structures_train_alike_in_eager_mode_and_compiled() -> None:
    shown = run(EXAMPLES / "structures" / "train.py")
    assert shown.count("in eager mode and compiled") == 4


def install(name: str, folder: Path) -> str:
    """Install an example's package into a folder, and return a PYTHONPATH that contains it."""
    source, target = folder / name, folder / "installed"
    shutil.copytree(EXAMPLES / name, source)  # the build may write to its folder
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        + ["--no-build-isolation", "--disable-pip-version-check", "--target", target, source],
        check=True,
        timeout=120,
    )
    return os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_package_of_operators_builds_and_passes_its_tests(tmp_path: Path) -> None:
    path = install("package", tmp_path)
    assert (tmp_path / "installed" / "mykernels" / "_native.so").exists()
    tests = str(tmp_path / "package" / "tests")
    # Skip the tests that compile programs, because they take two thirds of the time.
    fast = "not compile and not inductor and not aot_dispatch"
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-k", fast]
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    done = run_module("pytest", *options, *warnings, tests, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("memory.transposed", "contracts.leaks", "subsystems.fake"):
        assert f"PASSED package/tests/test_ops.py::test_operators[mykernels::softcap-{check}]" in (
            done.stdout
        )
    assert "test_softcap_is_a_scaled_tanh" in done.stdout


def test_rule_of_another_package_is_installed_and_used(tmp_path: Path) -> None:
    path = install("latency_rule", tmp_path)
    program = """
import torch, torchop
from latency_rule import estimate, latency

@torchop.operator("pkg::send")
class send:
    latency = 0.5

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

@torchop.custom_op("pkg::sort", mutates_args=())
def sort(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.sort(dim).values

@sort.register_latency
def _(x, dim):
    return 0.25 * x.shape[dim]

x = torch.ones(4)
latency.register("aten::neg", 0.125)
calls = [(send, x), (sort, x, 0), ("aten::neg", x), ("aten::sin", x)]
assert estimate(*calls) == 0.5 + 1.0 + 0.125, estimate(*calls)
try:
    sort.register_latency(lambda x: 1.0)
except torchop.RuleSignatureError as error:
    assert "pkg::sort: the rule 'latency' is called with (x, dim)" in str(error)
else:
    raise AssertionError("a wrong signature was accepted")
try:
    torchop.Rule("latency")
except ValueError as error:
    assert "latency_rule" in str(error)
else:
    raise AssertionError("a second rule took the name")
print("passed", latency)
"""
    done = run_forked(program, PYTHONPATH=path, TORCHOP_NATIVE="0")
    assert assert_clean(done) == "passed <torchop.Rule latency>\n"


@needs_native
def test_demo_passes_every_step_and_shows_pictures_and_costs(tmp_path: Path) -> None:
    shown = run(DEMO, "--output", str(tmp_path), "--rounds", "2")
    for step in ("eager", "torch.compile", "torch.export", "backward", "opcheck"):
        assert f"...  {step}\nok  {step}" in shown  # also shown while the step runs
    sizes = {"picture.png": (512, 600), "crop.png": (250, 300), "gradient.png": (512, 600)}
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


def test_demo_fails_if_a_step_fails(tmp_path: Path) -> None:
    # Make a step fail, with a box that extends beyond the picture: PIL pads such a crop, but
    # slicing does not. Run only two steps, because the test above runs the others.
    broken = """
        import sys, crop_demo
        crop_demo.BOX = (0, 0, 900, 900)
        crop_demo.STEPS = {name: crop_demo.STEPS[name] for name in ("eager", "opcheck")}
        crop_demo.measure_costs = lambda rounds: ("", "")
        sys.exit(crop_demo.main())
    """
    arguments = ["--output", str(tmp_path), "--rounds", "1"]
    process = run_compiling(broken, *arguments, folder=EXAMPLES)
    assert process.returncode == 1, process.stdout
    assert "FAILED  eager" in process.stdout
    assert "ok  opcheck" in process.stdout, "the step after it still runs"
