"""Do the C++ sources compile with every Python on this machine, and for a PyTorch to come?

    python tools/interpreters.py [--quick] [PYTHON ...]

Without arguments, those are asked that are in the PATH or that pyenv has, of the versions that
torchop supports. With --quick, only the oldest and the newest of them are, because what a version
in between takes away is missing from the newest too. PyTorch's headers are those of this
environment's PyTorch: they do not depend on the version of Python. Nothing is linked, so no other
PyTorch is needed.

A PyTorch to come is one whose nodes of autograd nobody knows: the sources then leave out what goes
around them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
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
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "call_path.cpp")
        whole.write_text(including(file.name for file in sorted(CSRC.glob("*.cpp"))))
        return compiler(include, "-Wall", "-Werror", "-fsyntax-only", str(whole))


def compiles_without_nodes(include: Path) -> bool:
    """Whether they compile where the nodes of autograd are not known, and define what is declared.

    What is missing would be noticed when the extension is loaded, with a release nobody has seen.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole, compiled = Path(folder, "whole.cpp"), Path(folder, "whole.o")
        whole.write_text(including(("autograd.cpp", "gradients.cpp", "plan.cpp")))
        unknown = ("-UTORCHOP_KNOWS_NODES", "-DTORCHOP_KNOWS_NODES=0")
        if not compiler(include, *unknown, "-O0", "-c", str(whole), "-o", str(compiled)):
            return False
        symbols = compiled.read_bytes()
    mangled = {name: f"_ZN7torchop{len(name)}{name}E" for name in declared()}
    missing = [name for name, symbol in mangled.items() if symbol.encode() not in symbols]
    print("".join(f"{name} is declared, and not defined\n" for name in missing), end="")
    return not missing


def declared() -> list[str]:
    """The functions of the headers that are not defined in them."""
    names: list[str] = []
    for header in ("autograd.h", "gradients.h"):
        text = (CSRC / header).read_text()
        found = re.findall(r"^(?!inline)\w[\w *]*?(\w+)\([^;{]*\);$", text, re.MULTILINE)
        assert found, f"{header} declares no function that this program understands"
        names += found
    return names


def including(files: Iterable[str]) -> str:
    return "".join(f'#include "{CSRC / file}"\n' for file in files)


def compiler(include: Path, *arguments: str) -> bool:
    """Whether the compiler accepts its arguments; it says why not."""
    torch_headers = Path(torch.__file__).parent / "include"
    command = [*find_compiler().command, *compile_flags()]
    for path in (torch_headers, torch_headers / "torch" / "csrc" / "api" / "include", include):
        command += ["-isystem", str(path)]
    return subprocess.run([*command, *arguments], check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("programs", nargs="*", metavar="PYTHON")
    options = parser.parse_args()
    failed = 0
    folders = headers(options.programs or interpreters())
    asked = {min(folders), max(folders)} if options.quick else folders.keys()
    for version in sorted(asked):
        include = folders[version]
        failed += report(compiles(include), f"Python {'.'.join(map(str, version))}: {include}")
    newest = list(folders.values())[-1]
    failed += report(compiles_without_nodes(newest), "a PyTorch whose nodes are not known")
    return 1 if failed else 0


def report(passed: bool, what: str) -> bool:
    """Prints how it ended, and returns whether it failed."""
    print(f"{'pass' if passed else 'FAIL'}  {what}", flush=True)
    return not passed


if __name__ == "__main__":
    raise SystemExit(main())
