"""Functions that import Dynamo or AOTInductor when they are called, because the import is slow."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import torch

from torchop._compat.compilers import DYNAMO


def import_dynamo() -> str:
    """Import Dynamo, which registers operators, and return the name of the module."""
    import torch._dynamo  # noqa: F401  # for the registrations

    return DYNAMO


def compile_aoti_package(
    program: Any, path: str | None, configs: dict[str, Any], linked: str | None = None
) -> str:
    """Compile an exported program into an AOTInductor package, and return the package's path.

    Args:
        program: the exported program.
        path: the path of the package, or None to let PyTorch choose it.
        configs: settings of Inductor.
        linked: the path of a shared library that the compiled program links with. At run time, it
            is loaded from the folder of the compiled program.
    """
    if linked is not None:
        libraries = "aot_inductor.custom_op_libs"
        # Inductor prepends "-l" to each entry, and splits the result as a shell does. So one entry
        # can contain several flags, if it starts with the name of a library.
        flags = f"c10 -Wl,--no-as-needed,-rpath,'$ORIGIN' {shlex.quote(linked)}"
        configs = {**configs, libraries: [*(configs.get(libraries) or ()), flags]}
    compile_package: Any = torch._inductor.aoti_compile_and_package
    return str(compile_package(program, package_path=path, inductor_configs=configs))


def build_library(source: str, path: str) -> None:
    """Compile C++ source into a shared library, with the compiler that Inductor uses.

    The library's soname is set to the name of the file.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports Inductor
    from torch.utils.cpp_extension import include_paths  # imports setuptools

    command = [*shlex.split(get_cpp_compiler()), "-shared", "-fPIC", "-std=c++20", "-x", "c++", "-"]
    command += [f"-Wl,-soname,{os.path.basename(path)}", "-o", path]
    command += [f"-I{folder}" for folder in include_paths()]
    subprocess.run(command, input=source, text=True, check=True)


def load_aoti_package(path: str, **options: Any) -> Any:
    return torch._inductor.aoti_load_package(path, **options)
