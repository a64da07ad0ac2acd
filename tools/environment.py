"""Makes a virtual environment with one release of PyTorch, in which the tests can be run.

    python tools/environment.py RELEASE FOLDER [NAME]

The environment is FOLDER/torch-RELEASE, or FOLDER/NAME, of the Python that runs this, with the
tools of requirements/dev.txt and this working tree. What PyPI has of PyTorch are CUDA builds, which
cannot be imported without NVIDIA's libraries, GPU or not: some 5 GB. They go into FOLDER/cuda,
once, as those of the newest release do for all of them. A build for the CPU, such as one in a
folder that PIP_FIND_LINKS names, needs none.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
# Prints where packages lie, and what the installed PyTorch needs besides the libraries of a GPU.
ASK = """
import importlib.metadata, re, sysconfig
print(sysconfig.get_paths()["platlib"])
for line in importlib.metadata.requires("torch"):
    if "extra ==" not in line and not re.match("nvidia|cuda|triton", line):
        print(line)
"""


def make(release: str, folder: Path, name: str | None = None) -> None:
    """Makes the environment of a release, such as "2.15.0", in a folder for those of all releases.

    Raises:
        subprocess.CalledProcessError: pip failed, or PyTorch cannot be imported.
    """
    environment = folder / (name or f"torch-{release}")
    finished = environment / ".installed"
    if finished.exists():
        return
    venv.create(environment, with_pip=True, clear=True)
    python = str(environment / "bin" / "python")
    _install(python, "--no-deps", f"torch=={release}")
    asked = subprocess.run([python, "-c", ASK], check=True, stdout=subprocess.PIPE, text=True)
    packages, *requires = asked.stdout.splitlines()
    _install(python, *requires, "-r", str(REQUIREMENTS / "dev.txt"))
    _install(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if not _can_import(python):
        libraries = _libraries(python, folder / "cuda")
        Path(packages, "nvidia").symlink_to(libraries / "nvidia")
        subprocess.run([python, "-c", "import torch"], check=True)
    finished.touch()


def _libraries(python: str, folder: Path) -> Path:
    """NVIDIA's libraries, downloaded when the first release needs them."""
    finished = folder / ".installed"
    if not finished.exists():
        _install(python, "--target", str(folder), "-r", str(REQUIREMENTS / "cuda.txt"))
        finished.touch()
    return folder.resolve()


def _can_import(python: str) -> bool:
    tried = subprocess.run([python, "-c", "import torch"], check=False, stderr=subprocess.DEVNULL)
    return tried.returncode == 0


def _install(python: str, *arguments: str) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, *arguments], check=True)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
