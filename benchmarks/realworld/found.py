"""Run the programs of docs/explanation/found.md, which show faults in published packages.

    python found.py

Each program runs in a process of its own. The packages must be in `.realworld`, where `nox -s
"realworld(part='checks')"` installs them. The script fails if a program fails, because then the
package no longer has the fault.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/found.md"
NOT_INSTALLED = ("executorch",)  # its dependencies are large
FOLDERS = {
    "anemoi": ("anemoi",),
    "bitsandbytes": ("packages",),
    "fbgemm_gpu": ("fbgemm", "packages"),
    "spikingjelly": ("spikingjelly",),
    "vllm": ("vllm",),
}


def programs() -> list[str]:
    return re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def main(folder: Path) -> int:
    failed = 0
    for number, program in enumerate(programs(), 1):
        package = next(
            name
            for name in (*FOLDERS, *NOT_INSTALLED)
            if re.search(rf"^import.*\b{name}\b", program, re.M)
        )
        if package in NOT_INSTALLED:
            print(f"program {number} ({package}): not run, because it is not installed")
            continue
        path = os.pathsep.join(str(folder / name) for name in FOLDERS[package])
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
        failed += done.returncode != 0
        print(f"program {number} ({package}): exit code {done.returncode}", flush=True)
        if done.returncode:
            print(done.stderr.decode()[-2000:])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / ".realworld"))
