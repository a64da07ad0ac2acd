"""Compile the device's extension, once for each version of PyTorch, Python and the sources.

Uses private names.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

from torchop._native.extension import files, recipe

SOURCES = Path(__file__).parent / "csrc"


def compiled() -> Path:
    """Return the path of the compiled extension, after compiling it if necessary."""
    target = files.cache_folder() / f"standin-{recipe.make_recipe(SOURCES).key}.so"
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        # Compile all files as one translation unit, because PyTorch's headers take most of the
        # time.
        text = "".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp")))
        command = [
            *recipe.find_compiler(),
            *recipe.compile_flags(),
            "-O0",  # halves the time to compile
            *recipe.include_flags(),
            # `-x none` ends the effect of `-x c++`, because the paths of libraries that follow must
            # not be compiled as C++.
            *("-o", str(unfinished), "-x", "c++", "-", "-x", "none"),
            *recipe.library_flags(),
            *recipe.link_flags(),
        ]
        subprocess.run(command, input=text, text=True, check=True)
        unfinished.replace(target)
    return target


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_standin", compiled())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
