"""Compile the C++ sources with the headers of several Pythons, and find undefined functions.

    python tools/headers.py [--unknown-nodes] PYTHON [PYTHON ...]

`nox -s headers` runs this script for each supported Python. PyTorch's headers do not depend on the
Python version, so they come from the environment that runs the script. With --unknown-nodes, the
sources are compiled a second time, as for a PyTorch release whose autograd nodes torchop does not
know.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from torchop._native.extension.recipe import CSRC, compile_flags, find_compiler

INCLUDE = "import sysconfig; print(sysconfig.get_paths()['include'])"
UNKNOWN_NODES = ["-UTORCHOP_KNOWS_NODES", "-DTORCHOP_KNOWS_NODES=0"]


def compiles(include: str, flags: list[str]) -> bool:
    """Return whether the sources compile and define every function. Prints all errors."""
    headers = Path(torch.__file__).parent / "include"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "call_path.cpp")
        compiled = Path(folder, "call_path.o")
        files = sorted(CSRC.glob("*.cpp"))
        source.write_text("".join(f'#include "{file}"\n' for file in files))
        command = [*find_compiler(), *compile_flags(), *flags, "-Wall", "-Werror", "-O0", "-c"]
        for path in (headers, headers / "torch" / "csrc" / "api" / "include", include):
            command += ["-isystem", str(path)]
        command += [str(source), "-o", str(compiled)]
        return subprocess.run(command, check=False).returncode == 0 and not undefined(compiled)


def undefined(compiled: Path) -> list[str]:
    """Print and return the functions of torchop that are declared and called but not defined.

    Compiling does not report such functions. Without this check, loading the extension would fail.
    """
    command = ["nm", "--demangle", "--undefined-only", str(compiled)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    missing = [line.strip() for line in listed.splitlines() if " torchop::" in line]
    for line in missing:
        print(f"declared, but not defined: {line}")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--unknown-nodes", action="store_true", help="compile a second time")
    parser.add_argument("programs", nargs="+", metavar="PYTHON")
    options = parser.parse_args()
    variants: dict[str, list[str]] = {"this PyTorch": []}
    if options.unknown_nodes:
        variants["a PyTorch with unknown autograd nodes"] = UNKNOWN_NODES
    failures = 0
    for program in options.programs:
        asked = [program, "-c", INCLUDE]
        include = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        for name, flags in variants.items():
            passed = compiles(include, flags)
            failures += not passed
            print(f"{'pass' if passed else 'FAIL'}  {include}, {name}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
