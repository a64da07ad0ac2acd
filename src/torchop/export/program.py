"""Saving and loading exported programs, with the modules that define their operators."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from typing import IO, Any, TypeAlias

import torch
from torch.export import ExportedProgram

from torchop._compat import operators
from torchop._compat.classes import OpOverload
from torchop._core.registry import own_definition
from torchop._errors import OperatorNotFoundError, warn
from torchop._schema import naming

File: TypeAlias = "str | os.PathLike[str] | IO[bytes]"

_MANIFEST = "torchop_operators.json"
_LONGEST_NAME = 200  # characters of a module, in a message
# Where PyTorch puts extra files, in this version of its format and in the one before.
_EXTRA_FOLDERS = frozenset({"extra", "extra_files"})
# What reading a damaged zip file may raise.
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)
# The operator that a node calls, or passes to a higher-order operator: a decomposed program calls
# operators that mutate or have an effect through those.
_OPERATOR = re.compile(r'"(?:target|as_operator)": "torch\.ops\.(\w+)\.(\w+)\.(\w+)"')


def save(
    ep: ExportedProgram, f: File, *, extra_files: dict[str, Any] | None = None, **options: Any
) -> None:
    """Saves an exported program, with the modules that define its operators.

    Args:
        ep: the program.
        f: a path, or a binary file to write to.
        extra_files: contents to store by name, as in `torch.export.save`.
        options: the other options of `torch.export.save`.

    Example:
        >>> import io, torch, torchop, torchop.export
        >>> @torchop.custom_op("docs::increment", mutates_args=())
        ... def increment(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1
        >>> _ = increment.register_fake(lambda x: torch.empty_like(x))
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return increment(x)
        >>> file = io.BytesIO()
        >>> program = torch.export.export(Model(), (torch.ones(2),))
        >>> torchop.export.save(program, file)
        >>> _ = file.seek(0)
        >>> torchop.export.load(file).module()(torch.ones(2))
        tensor([2., 2.])

    The idea is `torch.export.save`.
    """
    manifest = json.dumps(_modules(ep))
    torch.export.save(ep, f, extra_files={**(extra_files or {}), _MANIFEST: manifest}, **options)


def load(f: File, *, extra_files: dict[str, Any] | None = None, **options: Any) -> ExportedProgram:
    """Loads an exported program.

    Args:
        f: a path, or a binary file to read from.
        extra_files: names of contents to read into this dictionary, as in `torch.export.load`.
        options: the other options of `torch.export.load`.

    Raises:
        OperatorNotFoundError: the program uses an operator that nobody defined in this process;
            names it and, if `torchop.export.save` wrote the file, the module to import.

    Warns:
        UserWarning: the list of modules in the file is damaged; the program is loaded without it.

    The idea is `torch.export.load`.
    """
    if not isinstance(f, (str, os.PathLike)):
        f = io.BytesIO(f.read())  # it is read twice
    _check_operators(f)
    if not isinstance(f, (str, os.PathLike)):
        f.seek(0)
    return torch.export.load(f, extra_files=extra_files, **options)


def _modules(ep: ExportedProgram) -> dict[str, str]:
    """The modules that define the operators of a program, by the operator's name."""
    operators_called = {
        value
        for module in ep.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        for value in (node.target, *node.args, *node.kwargs.values())
        if isinstance(value, OpOverload)
    }
    definitions = [own_definition(op, naming.parse(op._name)) for op in operators_called]
    sites = {str(d): d.declaration.site for d in definitions if d is not None}
    return {name: site.module for name, site in sorted(sites.items()) if site is not None}


def _check_operators(f: Any) -> None:
    modules: dict[str, str] = {}
    used: set[tuple[str, ...]] = set()
    try:
        with zipfile.ZipFile(f) as archive:
            for name in archive.namelist():
                folder, _, base = name.rpartition("/")
                if not _EXTRA_FOLDERS.isdisjoint(folder.split("/")):  # PyTorch reads none of it
                    if base == _MANIFEST:
                        modules = _read_manifest(archive, name)
                elif name.endswith(".json"):
                    used.update(_OPERATOR.findall(archive.read(name).decode(errors="replace")))
    except _UNREADABLE:
        return  # torch.export.load explains what is wrong with the file itself
    for namespace, name, overload in sorted(used):
        overload = "" if overload == "default" else overload
        if not operators.is_registered(f"{namespace}::{name}", overload):
            missing = str(naming.OpName(namespace, name, overload))
            module = modules.get(missing)
            where = f"the module {module!r}, which defines it" if module else "what defines it"
            raise OperatorNotFoundError(
                f"the exported program uses the operator {missing}, which is not registered in "
                f"this process. Import {where}, before loading the program."
            )


def _read_manifest(archive: zipfile.ZipFile, name: str) -> dict[str, str]:
    """The module that defines each operator; empty, with a warning, if that is damaged."""
    try:
        modules = json.loads(archive.read(name))
        if isinstance(modules, dict) and all(isinstance(m, str) for m in modules.values()):
            return {op: module[:_LONGEST_NAME] for op, module in modules.items()}
    except _UNREADABLE:
        pass
    warn(
        f"torchop.export.load: {_MANIFEST} in the file is damaged, which names the modules that "
        "define its operators. The program is loaded without it; export and save it again.",
        UserWarning,
    )
    return {}
