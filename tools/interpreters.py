"""Which Pythons of this machine does torchop work with? And do its sources with a PyTorch to come?

    python tools/interpreters.py [--quick] [--release RELEASE] [PYTHON ...]

Without arguments, those are asked that are in the PATH or that pyenv has, of the versions that
torchop supports. The C++ sources are compiled with the headers of each, and those of this
environment's PyTorch, which do not depend on the version of Python. Nothing is linked.

With --quick, only the oldest and the newest are asked, because what a version in between takes away
is missing from the newest too. Otherwise the tests of the core then run with each, in an
environment with the RELEASE of PyTorch, or with this environment's. It is said for which Python
there is no such PyTorch, and which versions that the metadata of torchop names are not on this
machine.

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
from typing import NamedTuple

import torch

from torchop._native.extension.recipe import CSRC, compile_flags, find_compiler

ROOT = Path(__file__).parents[1]
OLDEST = (3, 10)
TESTS = [f"tests/{room}" for room in ("core", "define", "native", "rules")]
ASK = """
import json, sys, sysconfig
free = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print(json.dumps([*sys.version_info[:2], free, sysconfig.get_paths()["include"]]))
"""


class Interpreter(NamedTuple):
    """A Python of this machine."""

    minor: int
    free: str  # "t" where it can run without the GIL
    program: str
    include: Path  # its headers

    def __str__(self) -> str:
        return f"3.{self.minor}{self.free}"


def interpreters() -> list[str]:
    """The programs that may be a Python, by name."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [f"python3.{minor}{free}" for minor in range(OLDEST[1], 20) for free in ("", "t")]
    in_path = [path for name in names if (path := shutil.which(name))]
    return [sys.executable, *in_path, *map(str, sorted(pyenv.glob("versions/*/bin/python")))]


def found(programs: list[str]) -> list[Interpreter]:
    """One of each version that has its headers and that torchop supports, the oldest first."""
    first: dict[tuple[int, str], Interpreter] = {}
    for program in programs:
        # A name in the PATH may be that of a version manager, which refuses to run it.
        asked = subprocess.run([program, "-c", ASK], check=False, capture_output=True, text=True)
        if asked.returncode != 0:
            continue
        major, minor, free, include = json.loads(asked.stdout)
        if (major, minor) >= OLDEST and Path(include, "Python.h").is_file():
            one = Interpreter(minor, free, program, Path(include))
            first.setdefault((minor, free), one)
    return sorted(first.values())


def classified() -> set[str]:
    """The versions of Python that the metadata of the package names."""
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata))


def passes(python: Interpreter, release: str, folder: Path) -> bool:
    """Whether the tests of the core pass with a Python and a release of PyTorch."""
    name = f"torch-{release}-python{python}"
    environment = [python.program, str(ROOT / "tools" / "environment.py"), release, str(folder)]
    made = subprocess.run([*environment, name], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        if f"No matching distribution found for torch=={release}" in made.stderr:
            print(f"----  Python {python}: there is no PyTorch {release} for it", flush=True)
            return True
        print(made.stderr)
        return report(False, f"Python {python}: an environment with PyTorch {release}")
    tests = [str(folder / name / "bin" / "python"), "-m", "pytest", "-q", "-n", "2", *TESTS]
    done = subprocess.run(tests, check=False, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line)
    passed = done.returncode == 0
    return report(passed, f"Python {python} with PyTorch {release}: {lines[-1].strip('= ')}")


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
    command = [*find_compiler(), *compile_flags()]
    for path in (torch_headers, torch_headers / "torch" / "csrc" / "api" / "include", include):
        command += ["-isystem", str(path)]
    return subprocess.run([*command, *arguments], check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--release", default=torch.__version__.partition("+")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="for environments")
    parser.add_argument("programs", nargs="*", metavar="PYTHON")
    options = parser.parse_args()
    pythons = found(options.programs or interpreters())
    results = [
        report(compiles(python.include), f"Python {python}: {python.include}")
        for python in (sorted({pythons[0], pythons[-1]}) if options.quick else pythons)
    ]
    results.append(
        report(compiles_without_nodes(pythons[-1].include), "a PyTorch whose nodes are not known")
    )
    if not options.quick:
        results += [passes(python, options.release, options.folder) for python in pythons]
        for missing in sorted(classified() - set(map(str, pythons))):
            print(f"----  Python {missing}: not on this machine", flush=True)
    return 0 if all(results) else 1


def report(passed: bool, what: str) -> bool:
    """Prints how it ended, and returns whether it passed."""
    print(f"{'pass' if passed else 'FAIL'}  {what}", flush=True)
    return passed


if __name__ == "__main__":
    raise SystemExit(main())
