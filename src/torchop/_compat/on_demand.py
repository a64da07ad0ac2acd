"""Dynamo and AOTInductor where somebody asks for them: eager use imports neither."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import torch

from torchop._compat.compilers import DYNAMO


def import_dynamo() -> str:
    """Imports Dynamo, which registers operators of its own; returns the name of the module."""
    import torch._dynamo  # noqa: F401  # for what it registers

    return DYNAMO


def compile_aoti_package(
    program: Any, path: str | None, configs: dict[str, Any], linked: str | None = None
) -> str:
    """Compiles an exported program with AOTInductor into a package; returns its path.

    It may be linked with a library, which is found beside the compiled program when that is loaded.
    """
    if linked is not None:
        libraries = "aot_inductor.custom_op_libs"
        # Inductor writes "-l" before each, and takes the whole apart as a shell does.
        flags = f"c10 -Wl,--no-as-needed,-rpath,'$ORIGIN' {shlex.quote(linked)}"
        configs = {**configs, libraries: [*(configs.get(libraries) or ()), flags]}
    compile_package: Any = torch._inductor.aoti_compile_and_package
    return str(compile_package(program, package_path=path, inductor_configs=configs))


def build_library(source: str, path: str) -> None:
    """Compiles C++ code with the compiler of Inductor into a shared library, known by its name."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports Inductor
    from torch.utils.cpp_extension import include_paths  # imports setuptools

    command = [*shlex.split(get_cpp_compiler()), "-shared", "-fPIC", "-std=c++20", "-x", "c++", "-"]
    command += [f"-Wl,-soname,{os.path.basename(path)}", "-o", path]
    command += [f"-I{folder}" for folder in include_paths()]
    subprocess.run(command, input=source, text=True, check=True)


def load_aoti_package(path: str, **options: Any) -> Any:
    return torch._inductor.aoti_load_package(path, **options)
