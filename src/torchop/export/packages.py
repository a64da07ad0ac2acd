"""AOTInductor packages, with the modules of their operators or with C++ kernels."""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

import torchop
from torchop._compat import on_demand
from torchop._inspect.registrant import is_defined_in_python, python_kernel
from torchop.export.programs import (
    METADATA,
    check_operators,
    contents_of_package,
    in_package,
    modules_of,
)
from torchop.export.results import check_results, unsupported_results
from torchop.extend import Operator, OpName, warn

_SOURCE = """\
// The operators that {package} calls, for a process where nobody else defines them.
// Made by torchop.export.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

static bool is_missing(const char* name, const char* overload) {{
  return !c10::Dispatcher::singleton().findSchema({{name, overload}}).has_value();
}}
{blocks}"""
# The kernel libraries are stored next to this library, and loaded before it defines an operator. If
# all operators are defined already, so are their kernels.
_LOADER = """
#include <dlfcn.h>

static const bool has_loaded = [] {{
  if (!({missing}))
    return false;
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&is_missing), &here);
  for (int place = 0; place < {count}; ++place) {{
    const std::string path = std::string(here.dli_fname) + '.' + std::to_string(place);
    if (dlopen(path.c_str(), RTLD_NOW) == nullptr)
      TORCH_WARN(dlerror());
  }}
  return true;
}}();
"""
_CARRIER = "torchop_operators_"  # the prefix of the name of the library with this code


def aoti_package(
    ep: ExportedProgram,
    package_path: str | os.PathLike[str] | None = None,
    *,
    inductor_configs: dict[str, Any] | None = None,
    libraries: Sequence[str | os.PathLike[str]] = (),
) -> str:
    """Compile a program with AOTInductor, and store the modules that define the operators.

    They are the entry `torchop_operators` of the package's metadata, so a C++ server can read them
    before it loads the package.

    Compiled code relies on fake kernels. So the program first runs on its example inputs, and the
    results of each custom operator are compared with the fake kernel.

    Args:
        ep: the program.
        package_path: the path of the package, which must end with `.pt2`; by default, a temporary
            file.
        inductor_configs: as in `torch._inductor.aoti_compile_and_package`.
        libraries: shared libraries with C++ kernels, on Linux only. The package carries them and
            the operators' definitions, so that it also runs in a process without both, and without
            Python. They are loaded into this process with `torch.ops.load_library`.

    Returns:
        The path of the package.

    Raises:
        RuntimeError: Inductor cannot compile the program. The message names operators with results
            that packages do not support.
        FakeKernelError: on the example inputs, an operator returned a tensor with other metadata
            than its fake kernel.
        ArgumentError: a `TypeError`: `libraries` is a single path instead of a list.
        OSError: a library cannot be loaded; see the cause.
        MissingKernelError: with `libraries`, an operator of the package has no C++ kernel for the
            package's device. No package is written.
        NotImplementedError: `libraries` on another system than Linux.

    Warns:
        UserWarning: the package calls operators with Python kernels, or the program does not run on
            its example inputs, so results were not compared.

    Example:
        >>> import torch, torchop, torchop.export
        >>> @torchop.custom_op("docs::halve", mutates_args=())
        ... def halve(x: torch.Tensor) -> torch.Tensor:
        ...     return x / 2
        >>> _ = halve.register_fake(lambda x: torch.empty_like(x))
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return halve(x) + 1
        >>> program = torch.export.export(Model(), (torch.ones(2),))
        >>> path = torchop.export.aoti_package(program, "model.pt2")  # doctest: +SKIP
        >>> torchop.export.load_package(path)(torch.ones(2))  # doctest: +SKIP
        tensor([1.5000, 1.5000])

    Based on `torch._inductor.aoti_compile_and_package`.
    """
    if isinstance(libraries, (str, os.PathLike)):
        raise torchop.ArgumentError(
            f"aoti_package: libraries is a list of paths, got {libraries!r}. Write [{libraries!r}]."
        )
    if libraries and sys.platform != "linux":
        raise NotImplementedError(
            "aoti_package: a package carries libraries=... on Linux alone, because they are found "
            f"and loaded as there; this is {sys.platform}. Leave them out, "
            "define the operators in C++ with TORCH_LIBRARY, and load their library before the "
            "package."
        )
    check_results(ep)
    configs = dict(inductor_configs or {})
    metadata = configs.get("aot_inductor.metadata") or {}
    configs["aot_inductor.metadata"] = {**metadata, METADATA: modules_of(ep)}
    path = None if package_path is None else os.fspath(package_path)
    if libraries:
        return _with_libraries(list(map(os.path.abspath, libraries)), ep, path, configs)
    path = _compiled(ep, path, configs)
    names, device = contents_of_package(path)
    without = _without_kernels(names, device)
    in_python = ", ".join(f"{op} (see {site})" for op, site in without.items())
    if in_python:
        warn(
            f"aoti_package: on {device}, the package calls Python kernels, so it needs a process "
            f"with Python, and each of these calls takes the GIL: {in_python}. To avoid that, "
            "register kernels with TORCH_LIBRARY_IMPL, and pass their library: "
            "aoti_package(..., libraries=[...]).",
            UserWarning,
        )
    return path


def load_package(path: str | os.PathLike[str], **options: Any) -> Any:
    """Load an AOTInductor package.

    Args:
        path: the path of the package.
        options: the options of `torch._inductor.aoti_load_package`, such as `device_index`.

    Returns:
        The compiled program, which is called like its module.

    Raises:
        OperatorNotFoundError: an operator of the program is not defined in this process. The
            message names the module to import if `torchop.export.aoti_package` wrote the package.

    Warns:
        ProviderWarning: when compiled, an operator used a provider that is not registered here.
        UserWarning: the list of modules in the package is damaged, so it is ignored.

    Example: see `torchop.export.aoti_package`.

    Based on `torch._inductor.aoti_load_package`.
    """
    path = os.fspath(path)
    if not _carries_operators(path):
        check_operators(path, in_package, "the package", "torchop.export.load_package", METADATA)
    return on_demand.load_aoti_package(path, **options)


def _source(path: str, operators: list[Operator], loader: str) -> str:
    own = filter(is_defined_in_python, operators)
    blocks = (
        "\n".join((f"\nTORCH_LIBRARY_FRAGMENT({namespace}, m) {{", *map(_definition, group), "}\n"))
        for namespace, group in itertools.groupby(own, lambda op: op.name.namespace)
    )
    return _SOURCE.format(package=os.path.basename(path), blocks="".join((loader, *blocks)))


def _with_libraries(
    libraries: list[str], ep: ExportedProgram, path: str | None, configs: Any
) -> str:
    """Create a package with libraries, and a library that loads them and defines the operators."""
    for library in libraries:
        torch.ops.load_library(library)
    with tempfile.TemporaryDirectory() as folder:
        # A process loads only one library per name, so each package uses a unique name.
        carrier = os.path.join(folder, f"{_CARRIER}{uuid.uuid4().hex}")
        on_demand.build_library("", carrier)
        path = _compiled(ep, path, configs, linked=carrier)
        try:
            _add_libraries(libraries, carrier, path)
        except BaseException:
            os.remove(path)  # the package is unusable
            raise
    return path


def _compiled(ep: ExportedProgram, path: str | None, configs: Any, **options: str) -> str:
    try:
        return on_demand.compile_aoti_package(ep, path, configs, **options)
    except Exception as error:
        unsupported = "; ".join(unsupported_results(ep))
        if not unsupported:
            raise
        raise RuntimeError(
            f"aoti_package: {unsupported}. An operator of a package can only return tensors, lists "
            "of tensors and None. Return a 0-dim tensor instead of a number, or write an operator "
            "that returns only tensors for this program."
        ) from error


def _add_libraries(libraries: list[str], carrier: str, path: str) -> None:
    """Add libraries to a package, with a loader that is compiled for its operators."""
    names, device = contents_of_package(path)
    operators = _with_kernels(names, device)
    loader = _LOADER.format(
        missing=" || ".join(f"is_missing({_name(op)})" for op in operators) or "false",
        count=len(libraries),
    )
    # PyTorch reports this as the operators' registration site
    place = f'#line 1 "{os.path.basename(path)}"\n'
    on_demand.build_library(place + _source(path, operators, loader), carrier)
    with zipfile.ZipFile(path, "a") as archive:
        (wrapper,) = (name for name in archive.namelist() if name.endswith(".wrapper.so"))
        inside = f"{posixpath.dirname(wrapper)}/{os.path.basename(carrier)}"
        archive.write(carrier, inside)
        for number, library in enumerate(libraries):
            archive.write(library, f"{inside}.{number}")


def _carries_operators(path: str) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(f"/{_CARRIER}" in name for name in archive.namelist())


def _with_kernels(names: list[OpName], device: str) -> list[Operator]:
    """Return the operators that a package calls; raise if one has no C++ kernel."""
    for op, site in _without_kernels(names, device).items():
        raise torchop.MissingKernelError(
            f"{op}: the package calls it on {device}, but it has no C++ kernel there (see "
            f"{site}), so no process without Python can run the package. Register one with "
            f"TORCH_LIBRARY_IMPL({op.name.namespace}, ...), and load its library here with "
            "torch.ops.load_library, or name it in aoti_package(..., libraries=[...])."
        )
    return [Operator(name, "aoti_package") for name in names]


def _without_kernels(names: Iterable[OpName], device: str) -> dict[Operator, str]:
    """Return the operators without a C++ kernel, and the site of their Python kernel."""
    operators = [Operator(name, "aoti_package") for name in names]
    sites = {op: python_kernel(op, device) for op in operators}
    return {op: site for op, site in sites.items() if site is not None}


def _definition(op: Operator) -> str:
    schema = json.dumps(str(op.overload._schema).partition("::")[2])
    return f"  if (is_missing({_name(op)}))\n    m.def({schema});"


def _name(op: Operator) -> str:
    return f'"{op.name.namespace}::{op.name.name}", "{op.name.overload}"'
