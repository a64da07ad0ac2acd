"""Saving and loading exported programs, with the modules that define their operators."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from typing import IO, Any, TypeAlias

import torch
from torch.export import ExportedProgram

from torchop._schema.naming import OpName
from torchop.export.modules import UNREADABLE, check_registered, modules_of, read_modules

File: TypeAlias = "str | os.PathLike[str] | IO[bytes]"

_MANIFEST = "torchop_operators.json"
# Where PyTorch puts extra files, in this version of its format and in the one before.
_EXTRA_FOLDERS = frozenset({"extra", "extra_files"})
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
    manifest = json.dumps(modules_of(ep))
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


def _check_operators(f: Any) -> None:
    modules: dict[str, str] = {}
    used: set[tuple[str, ...]] = set()
    try:
        with zipfile.ZipFile(f) as archive:
            for name in archive.namelist():
                folder, _, base = name.rpartition("/")
                if not _EXTRA_FOLDERS.isdisjoint(folder.split("/")):  # PyTorch reads none of it
                    if base == _MANIFEST:
                        modules = read_modules(archive.read(name), "torchop.export.load", _MANIFEST)
                elif name.endswith(".json"):
                    used.update(_OPERATOR.findall(archive.read(name).decode(errors="replace")))
    except UNREADABLE:
        return  # torch.export.load explains what is wrong with the file itself
    operators = {OpName(ns, name, "" if ov == "default" else ov) for ns, name, ov in used}
    check_registered("the exported program", operators, modules)
