"""Packages of AOTInductor, with the modules that define the operators of their programs."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from typing import Any

from torch.export import ExportedProgram

from torchop._compat import compilers
from torchop._errors import OperatorNameError
from torchop._schema import naming
from torchop._schema.naming import OpName
from torchop.export.modules import UNREADABLE, check_registered, modules_of, read_modules

METADATA = "torchop_operators"


def aoti_package(
    ep: ExportedProgram,
    package_path: str | os.PathLike[str] | None = None,
    *,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Compiles a program with AOTInductor, and stores the modules that define its operators.

    They are the entry `torchop_operators` of the package's metadata, so a server in C++ can read
    them before it loads the package.

    Args:
        ep: the program.
        package_path: where to write the package, a path that ends with `.pt2`; by default, a
            temporary file.
        inductor_configs: as in `torch._inductor.aoti_compile_and_package`.

    Returns:
        The path of the package.

    Raises:
        RuntimeError: Inductor cannot compile the program.

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

    The idea is `torch._inductor.aoti_compile_and_package`.
    """
    configs = dict(inductor_configs or {})
    metadata = configs.get("aot_inductor.metadata") or {}
    configs["aot_inductor.metadata"] = {**metadata, METADATA: json.dumps(modules_of(ep))}
    path = None if package_path is None else os.fspath(package_path)
    return compilers.compile_aoti_package(ep, path, configs)


def load_package(path: str | os.PathLike[str], **options: Any) -> Any:
    """Loads a package of AOTInductor.

    Args:
        path: the path of the package.
        options: those of `torch._inductor.aoti_load_package`, such as `device_index`.

    Returns:
        The compiled program, which is called like its module.

    Raises:
        OperatorNotFoundError: the program uses an operator that nobody defined in this process;
            names it and, if `torchop.export.aoti_package` wrote the package, the module to import.

    Warns:
        UserWarning: the list of modules in the package is damaged; it is loaded without it.

    Example: see `torchop.export.aoti_package`.

    The idea is `torch._inductor.aoti_load_package`.
    """
    path = os.fspath(path)
    modules: dict[str, str] = {}
    used: set[OpName] = set()
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".wrapper_metadata.json"):
                    metadata = json.loads(archive.read(name))
                    if METADATA in metadata:
                        modules |= read_modules(
                            metadata[METADATA], "torchop.export.load_package", METADATA
                        )
                elif name.endswith(".wrapper.json"):
                    used.update(_operators(json.loads(archive.read(name))))
    except (*UNREADABLE, TypeError):
        used = set()  # Inductor explains what is wrong with the file itself
    check_registered("the package", used, modules)
    return compilers.load_aoti_package(path, **options)


def _operators(calls: Any) -> Iterator[OpName]:
    """The operators that compiled code calls through PyTorch's dispatcher."""
    for node in calls["nodes"]:
        try:
            yield naming.parse(node["node"]["target"])
        except OperatorNameError:
            continue  # a higher-order operator, or what else Inductor may write there
