"""Do the C++ sources compile with the headers of every Python on this machine?

    python tools/interpreters.py [PYTHON ...]

Without arguments, those are asked that are in the PATH or that pyenv has, of the versions that
torchop supports. PyTorch's headers are those of this environment's PyTorch: they do not depend on
the version of Python. Nothing is linked, so no other PyTorch is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from torchop._native.extension.recipe import CSRC, compile_flags, find_compiler

OLDEST = (3, 10)
ASK = """
import json, sys, sysconfig
print(json.dumps([sys.version_info[:2], sysconfig.get_paths()["include"]]))
"""


def interpreters() -> list[str]:
    """The programs that may be a Python, by name."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [f"python3.{minor}" for minor in range(OLDEST[1], 20)]
    in_path = [path for name in names if (path := shutil.which(name))]
    return [sys.executable, *in_path, *map(str, sorted(pyenv.glob("versions/*/bin/python")))]


def headers(programs: list[str]) -> dict[tuple[int, ...], Path]:
    """Where the headers of each version of Python are, that has them and that torchop supports."""
    folders: dict[tuple[int, ...], Path] = {}
    for program in programs:
        # A name in the PATH may be that of a version manager, which refuses to run it.
        asked = subprocess.run([program, "-c", ASK], check=False, capture_output=True, text=True)
        if asked.returncode != 0:
            continue
        version, include = json.loads(asked.stdout)
        if tuple(version) >= OLDEST and Path(include, "Python.h").is_file():
            folders.setdefault(tuple(version), Path(include))
    return dict(sorted(folders.items()))


def compiles(include: Path) -> bool:
    """Whether the sources compile with these headers of Python; the compiler says why not."""
    torch_headers = Path(torch.__file__).parent / "include"
    folders = [torch_headers, torch_headers / "torch" / "csrc" / "api" / "include", include]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "call_path.cpp")
        whole.write_text("".join(f'#include "{file}"\n' for file in sorted(CSRC.glob("*.cpp"))))
        command = [*find_compiler().command, *compile_flags(), "-Wall", "-Werror", "-fsyntax-only"]
        for path in folders:
            command += ["-isystem", str(path)]
        return subprocess.run([*command, str(whole)], check=False).returncode == 0


def main(programs: list[str]) -> int:
    failed = 0
    for version, include in headers(programs or interpreters()).items():
        passed = compiles(include)
        failed += not passed
        name = ".".join(map(str, version))
        print(f"{'pass' if passed else 'FAIL'}  Python {name}: {include}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
