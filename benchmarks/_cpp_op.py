"""Compile the C++ operators in clone_first.cpp."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import torch

from torchop._errors import NativeUnavailableError
from torchop._native.extension import recipe

SOURCE = Path(__file__).with_name("clone_first.cpp")
FOLDER = Path(__file__).parents[1] / ".native_cache" / "bench"


def build() -> Path:
    """Compile the operators as torchop's own extension is compiled, and return the library's path.

    An existing library is reused.
    """
    flags = [*recipe.compile_flags(), *recipe.include_flags(), *recipe.library_flags()]
    command = [*recipe.find_compiler(), *flags, str(SOURCE), *recipe.link_flags()]
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    file = FOLDER / f"clone_first-torch{torch.__version__}-{key}.so"
    if file.exists():
        return file
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Compile to another name and rename the complete file, because another process may compile it
    # at the same time.
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
