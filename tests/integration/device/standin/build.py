"""Compiles the device, once for each PyTorch, Python and state of the sources, and loads it.

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
    """The extension in the cache of the tests, compiled if it is not there yet."""
    target = files.cache_folder() / f"standin-{recipe.make_recipe(SOURCES).key}.so"
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        # All sources as one: most of the time goes into PyTorch's headers.
        text = "".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp")))
        command = [
            *recipe.find_compiler(),
            *recipe.compile_flags(),
            "-O0",  # it compiles in half the time
            *recipe.include_flags(),
            # The libraries behind the source may be named by their paths, and are no C++.
            *("-o", str(unfinished), "-x", "c++", "-", "-x", "none"),
            *recipe.library_flags(),
            *recipe.link_flags(),
        ]
        subprocess.run(command, input=text, text=True, check=True)
        unfinished.replace(target)
    return target


def load() -> ModuleType:
    """Load the extension, which registers the device with PyTorch."""
    spec = importlib.util.spec_from_file_location("_standin", compiled())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
