"""Run all tests and benchmarks that need a GPU (`nox -s gpu`).

    python tools/gpu.py [--out FOLDER] [--limit SECONDS]

The script runs several commands ("parts"), each with a time limit. It stores the output of each
part in FOLDER, together with summary.json and the results of the benchmark. Parts run in parallel,
except for the benchmark and other parts that use the whole machine. If there is no GPU, the parts
run on the CPU, and tests that need a GPU are skipped. The script only requires PyTorch, pytest and
torchop's dependencies. If another package is missing, the output of the part shows it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Use at most 12 processes, because the CUDA context of each process takes device memory.
PROCESSES = min(12, os.cpu_count() or 1)
PAGES = (
    "docs/tutorials/getting-started.md",
    "docs/tutorials/gpu-kernels.md",
    "docs/tutorials/class-form.md",
)
DESCRIBE = """
import platform, torch
print("torch", torch.__version__, "python", platform.python_version())
for number in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(number))
"""


class Part(NamedTuple):
    """A command with a time limit in seconds. If `alone` is true, it must not run in parallel."""

    name: str
    limit: int
    command: Sequence[str]
    on_device: bool = True
    alone: bool = False


class Outcome(NamedTuple):
    """How a part ended. `last` is the last line of the output."""

    name: str
    status: str
    seconds: float
    last: str


def device() -> str:
    """Return the device for the tests.

    Query the device in another process, because this process must not create a CUDA context.
    """
    ask = "import torch; print('cuda:0' if torch.cuda.is_available() else 'cpu')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def marked() -> list[str]:
    """Return the test files with tests that need CUDA."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    here = [file for file in files if "@pytest.mark.cuda" in file.read_text(encoding="utf-8")]
    return [str(file.relative_to(ROOT)) for file in here]


def parts(target: str, out: Path) -> list[Part]:
    """Return all parts, beginning with the most important."""
    python = sys.executable
    # Disable pytest-benchmark, because it would warn about parallel processes.
    pytest = (python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "-p", "no:benchmark")
    found = [
        Part("machine", 60, (python, "-c", DESCRIBE)),
        Part("build", 300, (python, "-c", "import torchop; torchop.native.wait()"), alone=True),
        Part("scenarios", 240, (*pytest, "tests/integration/device")),
        Part("marked", 200, (*pytest, "-m", "cuda", *marked()), on_device=False),
    ]
    for page in PAGES:
        program = out / f"page_{Path(page).stem.replace('-', '_')}.py"
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
        program.write_text("\n".join(blocks), encoding="utf-8")  # Triton reads kernels from a file
        found.append(Part(program.stem, 200, (python, str(program)), on_device=False))
    benchmark = ("benchmarks/device.py", "--json", str(out / "device.json"))
    found.append(Part("benchmark", 120, (python, *benchmark), alone=True))
    if target != "cpu":  # `make test` runs these tests on the CPU
        spread = ("-n", str(PROCESSES)) if importlib.util.find_spec("xdist") else ()
        anywhere = (*pytest, "-p", "tests._support.on_device", "--tb=short", *spread)
        found.append(Part("anywhere", 600, anywhere, alone=True))
    return found


def stages(found: Iterable[Part]) -> list[list[Part]]:
    """Group consecutive parts that may run in parallel into stages."""
    result: list[list[Part]] = []
    for part in found:
        if part.alone or not result or result[-1][0].alone:
            result.append([])
        result[-1].append(part)
    return result


def run(part: Part, target: str, out: Path, end: float) -> Outcome:
    """Run a part and print the outcome. Stops the part at the time `end` (of time.monotonic)."""
    environment = dict(os.environ)
    environment.pop("TORCHOP_TEST_DEVICE", None)
    if part.on_device:
        environment["TORCHOP_TEST_DEVICE"] = target
    started = time.monotonic()
    left = end - started
    limit = min(part.limit, left)
    file = out / f"{part.name}.txt"
    if left < 10:
        outcome = Outcome(part.name, "not run: no time left", 0.0, "")
    else:
        with file.open("w") as output:
            try:
                code = subprocess.run(
                    part.command,
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                ).returncode
                status = "passed" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit:.0f} s"
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        outcome = Outcome(part.name, status, time.monotonic() - started, last)
    name, status, seconds, last = outcome
    print(f"{name:28} {status:28} {seconds:5.0f} s  {last[:100]}", flush=True)
    return outcome


def main() -> int:
    """Run all parts; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    folder = Path(os.environ.get("OUT") or ROOT / ".gpu")
    parser.add_argument("--out", type=Path, default=folder, help="folder for the output files")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all parts together")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    target = device()
    print(f"Running on {target}. The output of each part is in {out}.", flush=True)
    end = time.monotonic() + options.limit
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        for stage in stages(parts(target, out)):
            outcomes += pool.map(lambda part: run(part, target, out, end), stage)
    if target == "cpu":
        print("No GPU was found: tests that need one were skipped.")
    summary = {"device": target, "parts": [outcome._asdict() for outcome in outcomes]}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return int(any(outcome.status != "passed" for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
