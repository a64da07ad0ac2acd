"""The modules that define the operators of a program: stored in its file, checked on loading."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping

import torch
from torch.export import ExportedProgram

from torchop._compat import operators
from torchop._compat.classes import OpOverload
from torchop._core.registry import own_definition
from torchop._errors import OperatorNotFoundError, warn
from torchop._schema import naming
from torchop._schema.naming import OpName

# What reading a damaged zip file may raise.
UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)
_LONGEST_NAME = 200  # characters of a module, in a message


def modules_of(ep: ExportedProgram) -> dict[str, str]:
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


def read_modules(contents: bytes | str, caller: str, file: str) -> dict[str, str]:
    """What `modules_of` returned, from JSON; empty, with a warning, if that is damaged."""
    try:
        modules = json.loads(contents)
        if isinstance(modules, dict) and all(isinstance(m, str) for m in modules.values()):
            return {op: module[:_LONGEST_NAME] for op, module in modules.items()}
    except UNREADABLE:
        pass
    warn(
        f"{caller}: the entry {file} of the file is damaged. It names the modules that define the "
        "operators of the program. The program is loaded without it; export and save the program "
        "again.",
        UserWarning,
    )
    return {}


def check_registered(what: str, used: Iterable[OpName], modules: Mapping[str, str]) -> None:
    """Refuses a program with an operator that nobody defined in this process."""
    for name in sorted(used):
        if operators.is_registered(name.packet, name.overload):
            continue
        module = modules.get(str(name))
        where = f"the module {module!r}, which" if module else "the module that"
        raise OperatorNotFoundError(
            f"{what} uses the operator {name}, which is not registered in this process. Import "
            f"{where} defines it, before loading the program."
        )
