"""Dynamo and AOTInductor, imported only on use, because eager programs avoid both."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import torch

from torchop._compat.compilers import DYNAMO


def import_dynamo() -> str:
    """Import Dynamo, which registers operators of its own; return its module name."""
    import torch._dynamo  # noqa: F401  # for what it registers

    return DYNAMO


def compile_aoti_package(
    program: Any, path: str | None, configs: dict[str, Any], linked: str | None = None
) -> str:
    """Compile an exported program into an AOTInductor package, and return its path.

    `linked` names a shared library to link. It is loaded from the folder of the compiled program.
    """
    if linked is not None:
        libraries = "aot_inductor.custom_op_libs"
        # Inductor prepends "-l" to each, and splits the result like a shell.
        flags = f"c10 -Wl,--no-as-needed,-rpath,'$ORIGIN' {shlex.quote(linked)}"
        configs = {**configs, libraries: [*(configs.get(libraries) or ()), flags]}
    compile_package: Any = torch._inductor.aoti_compile_and_package
    return str(compile_package(program, package_path=path, inductor_configs=configs))


def build_library(source: str, path: str) -> None:
    """Compile C++ source into a shared library with Inductor's compiler; set its soname."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports Inductor
    from torch.utils.cpp_extension import include_paths  # imports setuptools

    command = [*shlex.split(get_cpp_compiler()), "-shared", "-fPIC", "-std=c++20", "-x", "c++", "-"]
    command += [f"-Wl,-soname,{os.path.basename(path)}", "-o", path]
    command += [f"-I{folder}" for folder in include_paths()]
    subprocess.run(command, input=source, text=True, check=True)


def load_aoti_package(path: str, **options: Any) -> Any:
    return torch._inductor.aoti_load_package(path, **options)
