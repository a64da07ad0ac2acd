"""The operators of clone_first.cpp: compiled once, and loaded by every process that measures."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import torch

from torchop._errors import NativeUnavailableError
from torchop._native.extension import recipe

SOURCE = Path(__file__).with_name("clone_first.cpp")
# Git ignores it; the tests keep their extension in the folder above.
FOLDER = Path(__file__).parents[1] / ".native_cache" / "bench"


def build() -> Path:
    """Compiles the operators, unless that was done before, and returns the file.

    The compiler and the flags are those of torchop's own extension: a difference between the two is
    no difference of optimization.

    Raises:
        NativeUnavailableError: there is no compiler, or it fails.
    """
    flags = [*recipe.compile_flags(), *recipe.include_flags(), *recipe.library_flags()]
    command = [*recipe.find_compiler(), *flags, str(SOURCE), *recipe.link_flags()]
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    file = FOLDER / f"clone_first-torch{torch.__version__}-{key}.so"
    if file.exists():
        return file
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Under a name of its own until it is whole: several benchmarks may be compiling it.
    unfinished = file.with_suffix(f".{os.getpid()}")
    process = subprocess.run(
        [*command, "-o", str(unfinished)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise NativeUnavailableError(f"the compiler failed:\n{process.stdout}")
    unfinished.replace(file)
    return file
