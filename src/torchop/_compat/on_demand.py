"""Functions that import Dynamo or AOTInductor when they are called, because the import is slow."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import torch

from torchop._compat.compilers import DYNAMO


def import_dynamo() -> str:
    import torch._dynamo  # noqa: F401  # for the registrations

    return DYNAMO


def compile_aoti_package(
    program: Any, path: str | None, configs: dict[str, Any], linked: str | None = None
) -> str:
    """Compile an exported program into an AOTInductor package, and return the package's path.

    If `path` is None, PyTorch chooses the path. `linked` is a shared library with which the
    compiled program is linked. At run time, the library is loaded from the folder of the compiled
    program.
    """
    if linked is not None:
        libraries = "aot_inductor.custom_op_libs"
        # Inductor prepends "-l" to each entry, and splits the result as a shell does. So an entry
        # that starts with the name of a library can contain further flags.
        flags = f"c10 -Wl,--no-as-needed,-rpath,'$ORIGIN' {shlex.quote(linked)}"
        configs = {**configs, libraries: [*(configs.get(libraries) or ()), flags]}
    compile_package: Any = torch._inductor.aoti_compile_and_package
    return str(compile_package(program, package_path=path, inductor_configs=configs))


def build_library(source: str, path: str) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports Inductor
    from torch.utils.cpp_extension import include_paths  # imports setuptools

    command = [*shlex.split(get_cpp_compiler()), "-shared", "-fPIC", "-std=c++20", "-x", "c++", "-"]
    command += [f"-Wl,-soname,{os.path.basename(path)}", "-o", path]
    command += [f"-I{folder}" for folder in include_paths()]
    subprocess.run(command, input=source, text=True, check=True)


def load_aoti_package(path: str, **options: Any) -> Any:
    return torch._inductor.aoti_load_package(path, **options)
