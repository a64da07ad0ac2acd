"""Functions that import Dynamo or AOTInductor only when called, because these imports are slow."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from typing import Any

import torch

from torchop._compat import schemas
from torchop._compat.compilers import DYNAMO


def import_dynamo() -> str:
    import torch._dynamo  # noqa: F401  # for the registrations

    return DYNAMO


def compile_aoti_package(
    program: Any, path: str | None, configs: dict[str, Any], linked: str | None = None
) -> str:
    """Compile an exported program into an AOTInductor package, and return the package's path.

    If `path` is None, PyTorch chooses the path. `linked` is the path of a shared library, and the
    compiled program is linked against this library. At run time, the dynamic loader looks for the
    library in the folder that contains the compiled program.
    """
    if linked is not None:
        libraries = "aot_inductor.custom_op_libs"
        # Inductor prepends "-l" to each entry, and then splits the result like a shell. So an entry
        # that starts with a library name can carry more flags.
        flags = f"c10 -Wl,--no-as-needed,-rpath,'$ORIGIN' {shlex.quote(linked)}"
        configs = {**configs, libraries: [*(configs.get(libraries) or ()), flags]}
    compile_package: Any = torch._inductor.aoti_compile_and_package
    with _default_dtypes():
        return str(compile_package(program, package_path=path, inductor_configs=configs))


def _default_dtypes() -> contextlib.AbstractContextManager[Any]:
    """Write omitted dtype arguments into an AOTInductor package as dtypes rather than ints.

    `ExternKernel.fill_non_provided_args` (torch/_inductor/ir.py) fills in the default of an omitted
    argument from the schema, which stores dtypes as ints. But the package loader
    (torch/csrc/inductor/aoti_torch/oss_proxy_executor.cpp) rejects an int for a dtype.
    """
    from unittest import mock  # slow import

    from torch._inductor.ir import ExternKernel  # imports Inductor

    fill = ExternKernel.fill_non_provided_args

    def fill_with_dtypes(self: Any, args: Any, kwargs: Any) -> Any:
        def converted(name: str, value: Any) -> Any:
            if type(value) is not int:
                return value
            kind = self.allarg_properties[name]["type"].str()
            return schemas.enumeration(kind).get(value, value)

        # The caller writes `kwargs` into the package afterwards, so update it in place.
        kwargs.update({name: converted(name, value) for name, value in kwargs.items()})
        names = [properties["name"] for properties in self.arg_properties]
        return [*map(converted, names, fill(self, args, kwargs))]

    return mock.patch.object(ExternKernel, "fill_non_provided_args", fill_with_dtypes)


def build_library(source: str, path: str) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports Inductor
    from torch.utils.cpp_extension import include_paths  # imports setuptools

    command = [*shlex.split(get_cpp_compiler()), "-shared", "-fPIC", "-std=c++20", "-x", "c++", "-"]
    command += [f"-Wl,-soname,{os.path.basename(path)}", "-o", path]
    command += [f"-I{folder}" for folder in include_paths()]
    subprocess.run(command, input=source, text=True, check=True)


def load_aoti_package(path: str, **options: Any) -> Any:
    return torch._inductor.aoti_load_package(path, **options)
