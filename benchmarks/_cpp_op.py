"""Compile the operators of clone_first.cpp once, for all measuring processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import torch

from torchop._errors import NativeUnavailableError
from torchop._native.extension import recipe

SOURCE = Path(__file__).with_name("clone_first.cpp")
# Ignored by git. The tests cache the extension in the parent folder.
FOLDER = Path(__file__).parents[1] / ".native_cache" / "bench"


def build() -> Path:
    """Compile the operators if needed, and return the shared library.

    Uses the compiler and flags of torchop's extension, to compare equally optimized code.

    Raises:
        NativeUnavailableError: no compiler was found, or it failed.
    """
    flags = [*recipe.compile_flags(), *recipe.include_flags(), *recipe.library_flags()]
    command = [*recipe.find_compiler(), *flags, str(SOURCE), *recipe.link_flags()]
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    file = FOLDER / f"clone_first-torch{torch.__version__}-{key}.so"
    if file.exists():
        return file
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Write to a temporary name first, because another benchmark may be compiling the same file.
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
