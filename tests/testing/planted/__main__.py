"""Print a table of the planted faults, and the checks that find them. Uses private names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.testing.planted.package import KERNELS
from torchop._native.extension import recipe

HERE = Path(__file__).parent
STYLES = ("planted_custom", "planted_library", "planted_cpp")
# The check that finds each fault.
CHECKS = {
    "strides": "memory.gaps",
    "fake_strides": "subsystems.fake",
    "write": "contracts.schema",
    "alias": "contracts.schema",
    "narrow": "dtypes.int64",
    "tail": "memory.blocks",
    "gradient": "subsystems.gradcheck",
    "crash": "memory.empty",
}
assert list(CHECKS) == list(KERNELS)


def build(folder: Path) -> Path:
    flags = [*recipe.compile_flags(), *recipe.include_flags(), *recipe.library_flags()]
    library = folder / "planted.so"
    source = str(HERE / "operators.cpp")
    command = [*recipe.find_compiler(), *flags, source, *recipe.link_flags(), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def found(folder: Path, library: Path | None, *options: str) -> dict[str, list[str]]:
    """Run the test suite with the checks. Return the checks that fail for each operator."""
    environment = {**os.environ, "PLANTED_LIBRARY": "" if library is None else str(library)}
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-summary"]
    if "pytest_torchop" not in _installed():
        command += ["-p", "pytest_torchop"]
    command += [str(HERE / "suite.py"), "--torchop-check=planted_*::*", *options]
    command.append(f"--torchop-report={report}")
    subprocess.run(
        command, env=environment, cwd=HERE.parents[2], stdout=subprocess.DEVNULL, check=False
    )
    return {
        each["op"]: [r["check"] for r in each["results"] if r["outcome"] == "failed"]
        for each in json.loads(report.read_text(encoding="utf-8"))
    }


def _installed() -> set[str]:
    from importlib.metadata import entry_points

    return {point.value for point in entry_points(group="pytest11")}


def main() -> int:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        checks = found(Path(folder), build(Path(folder)))
    missed = 0
    for style in STYLES:
        for name, check in CHECKS.items():
            failed = checks.get(f"{style}::{name}", [])
            missed += check not in failed
            state = "found" if check in failed else "MISSED"
            print(f"{state:7}{style}::{name}: {check}; all: {', '.join(failed)}")
    print(f"{missed} of 24 faults missed in {time.perf_counter() - started:.0f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
