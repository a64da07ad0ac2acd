"""Save and load exported programs, with the names of the modules that define their operators.

Exported programs and AOTInductor packages are zip files. To find out which operators a program
calls, torchop reads the entries that PyTorch writes, and stores the names of the modules that
define these operators in the same file.
"""

from __future__ import annotations

import enum
import functools
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeAlias

import torch
from torch.export import ExportedProgram

import torchop
from torchop._compat import classes, graphs, opaque_types
from torchop._rules.providers import providers_of
from torchop.extend import Operator, OpName, short_repr, warn

File: TypeAlias = "str | os.PathLike[str] | IO[bytes]"

# The name of the zip entry that lists the modules that define an exported program's operators.
_MANIFEST = "torchop_operators.json"
# A package lists the modules that define its operators under this metadata key.
METADATA = "torchop_operators"
_DEVICE = "AOTI_DEVICE_KEY"  # the metadata key under which a package stores its device type
# PyTorch's current file format stores extra files in the folder `extra`, and the format before that
# in `extra_files`.
_EXTRA_FOLDERS = frozenset({"extra", "extra_files"})
# Matches an operator in the JSON of a program. A node either calls the operator directly, or passes
# it to a higher-order operator. Decomposed programs contain such nodes for operators that mutate
# arguments or have declared side effects.
_OPERATOR = re.compile(r'"(?:target|as_operator)": "torch\.ops\.(\w+)\.(\w+)\.(\w+)"')
# The exceptions that reading a damaged file may raise.
_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
_LISTS_PASSED_AS_NONE = frozenset({"int", "SymInt", "Tensor"})
_LONGEST_NAME = 200  # the maximum length of a module's name in messages


def save(
    ep: ExportedProgram, f: File, *, extra_files: dict[str, Any] | None = None, **options: Any
) -> None:
    """Save an exported program, with the names of the modules that define its operators.

    Args:
        ep: the program.
        f: a path, or a binary file to write to.
        extra_files: additional contents to store, by name, as in `torch.export.save`.
        options: other options of `torch.export.save`.

    Raises:
        TypeError: the program passes an object of an opaque class as a constant. PyTorch would
            write it into the file, but could not read it again.

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

    Based on `torch.export.save`.
    """
    check_constants(ep, "save")
    manifest = modules_of(ep)
    torch.export.save(ep, f, extra_files={**(extra_files or {}), _MANIFEST: manifest}, **options)


def load(f: File, *, extra_files: dict[str, Any] | None = None, **options: Any) -> ExportedProgram:
    """Load an exported program.

    Args:
        f: a path, or a binary file to read from.
        extra_files: a dictionary whose keys are the names of additional contents to read, as in
            `torch.export.load`.
        options: other options of `torch.export.load`.

    Raises:
        OperatorNotFoundError: an operator of the program is not defined in this process. If
            `torchop.export.save` wrote the file, the message names the module to import.
        FileNotFoundError: the file does not exist.
        zipfile.BadZipFile: the file is not an archive.

    Warns:
        ProviderWarning: when the program was saved, an operator used the kernel of a provider that
            is not registered in this process.
        UserWarning: the list of modules in the file is damaged, so it is ignored.

    Based on `torch.export.load`.
    """
    if not isinstance(f, (str, os.PathLike)):
        f = io.BytesIO(f.read())  # the contents are read twice
    _check_archive(f)
    check_operators(f, _in_program, "the exported program", "torchop.export.load", _MANIFEST)
    if not isinstance(f, (str, os.PathLike)):
        f.seek(0)
    return torch.export.load(f, extra_files=extra_files, **options)


# --------------------------------------------------------------------------------------------------
# Modules that define the operators


def check_constants(ep: ExportedProgram, caller: str) -> None:
    """Raise if a program has constants that torch.export can write but not read again."""
    for node in graphs.nodes_in(ep.graph_module):
        for value in classes.tree_leaves((node.args, node.kwargs)):
            name = opaque_types.custom_class_name(type(value))
            if name is not None and not isinstance(value, (enum.Enum, torch.Generator)):
                raise TypeError(
                    f"{node.target}: torchop.export.{caller} cannot store the constant "
                    f"{short_repr(value)} of the class {type(value).__name__}, because "
                    "torch.export writes such an object but cannot read it. Pass its fields as "
                    "numbers and strings, for example as a dataclass, which torchop flattens."
                )


def check_arguments(ep: ExportedProgram) -> None:
    """Raise if a package could not pass the constants of a program to its custom operators.

    Workaround for torch/csrc/inductor/aoti_torch/oss_proxy_executor.cpp: it cannot load inf and
    nan, which AOTInductor writes as strings, and passes an optional list that is empty as None.
    """
    for node in graphs.nodes_in(ep.graph_module):
        if getattr(node.target, "namespace", "aten") in ("aten", "prims"):
            continue
        # The target may be a higher-order operator, such as auto_functionalized_v2.
        operator = next((a for a in node.args if isinstance(a, classes.OpOverload)), node.target)
        for value in classes.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(
                    f"{operator}: torchop.export.aoti_package cannot store the argument "
                    f"{value}, because AOTInductor cannot load a package that contains inf or nan. "
                    "Pass None instead, and replace it in the operator's function."
                )
        if not isinstance(operator, classes.OpOverload):
            continue
        arguments = operator._schema.arguments
        for argument, value in zip(arguments, node.args, strict=False):
            _check_list(operator, argument, value)
        for argument in arguments:
            _check_list(operator, argument, node.kwargs.get(argument.name))


def _check_list(operator: classes.OpOverload, argument: Any, value: object) -> None:
    kind = str(argument.real_type)
    if value == [] and kind.startswith("Optional[List[") and kind[14:-2] in _LISTS_PASSED_AS_NONE:
        raise ValueError(
            f"{operator}: torchop.export.aoti_package cannot store the empty list that the program "
            f"passes for {argument.name!r}, because AOTInductor would pass None instead. Pass "
            "None, or declare the argument as a list that is not optional."
        )


def modules_of(ep: ExportedProgram) -> str:
    """Return JSON that maps each operator of a program to the module that defines it.

    If the kernel of `ns::f` comes from a provider, such as "triton", the JSON also maps
    `ns::f[triton]` to the module that registered the provider.
    """
    # Look up the operators by name, because they may have been redefined since the export.
    names = [op.name() for op in graphs.operators_in(ep.graph_module)]
    used = [Operator(OpName.parse(name), "save") for name in names]
    modules = {str(op): op.site.module for op in used if op.site is not None}
    for op in used:
        active = {k.provider for k in torchop.providers(str(op)) if k.rank and k.supported}
        here = [each for each in providers_of(str(op)) if each.name in active]
        modules |= {f"{op}[{each.name}]": each.site.module for each in here}
    return json.dumps(modules, sort_keys=True)


# Reads one entry of a zip file, given the entry's name and a function that returns its contents.
# Returns the JSON that maps operators to modules (None if the entry does not contain it), and the
# operators that the program calls according to the entry.
_Reader = Callable[[str, Callable[[], bytes]], "tuple[bytes | str | None, Iterable[OpName]]"]


def _in_program(name: str, read: Callable[[], bytes]) -> tuple[bytes | None, Iterable[OpName]]:
    folder, _, base = name.rpartition("/")
    if not _EXTRA_FOLDERS.isdisjoint(folder.split("/")):  # PyTorch ignores these files
        return read() if base == _MANIFEST else None, ()
    if not name.endswith(".json"):
        return None, ()
    text = read().decode(errors="replace")
    found = {*_OPERATOR.findall(text), *graphs.CALLED_BY_NAME.findall(text)}
    return None, [OpName(ns, op, "" if ov == "default" else ov) for ns, op, ov in found]


def in_package(name: str, read: Callable[[], bytes]) -> tuple[str | None, Iterable[OpName]]:
    if name.endswith(".wrapper_metadata.json"):
        return json.loads(read()).get(METADATA), ()
    if name.endswith(".wrapper.json"):
        return None, _called_operators(json.loads(read()))
    return None, ()


def contents_of_package(path: str | os.PathLike[str]) -> tuple[list[OpName], str]:
    path = os.fspath(path)
    _check_archive(path)
    called: set[OpName] = set()
    device = "cpu"
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            called.update(in_package(name, functools.partial(archive.read, name))[1])
            if name.endswith(".wrapper_metadata.json"):
                device = json.loads(archive.read(name)).get(_DEVICE, device)
    return sorted(called), device


def _called_operators(calls: Any) -> Iterable[OpName]:
    for node in calls["nodes"]:
        for match in graphs.CALLED_BY_NAME.findall(json.dumps(node)):
            yield OpName(*match)
        try:
            yield OpName.parse(node["node"]["target"])
        except torchop.OperatorNameError:
            continue  # the name of a higher-order operator, for example


def _check_archive(file: str | os.PathLike[str] | io.BytesIO) -> None:
    """Raise BadZipFile if a file is not an archive. PyTorch would only log an internal error."""
    if zipfile.is_zipfile(file):
        return
    if isinstance(file, io.BytesIO):
        name, start = "the file", file.getvalue()[:16]
    else:
        name = short_repr(os.fspath(file))
        with open(file, "rb") as opened:
            start = opened.read(16)
    raise zipfile.BadZipFile(
        f"torchop.export.load: {name} was not written by torchop.export or torch.export, because "
        f"it is not a zip archive. It starts with {start!r}."
    )


def check_operators(file: Any, reader: _Reader, what: str, caller: str, entry: str) -> None:
    """Raise OperatorNotFoundError if this process lacks an operator that a saved program calls."""
    modules: dict[str, str] = {}
    used: set[OpName] = set()
    try:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                stored, called = reader(name, functools.partial(archive.read, name))
                if stored is not None:
                    modules |= _read_modules(stored, caller, entry)
                used.update(called)
    except _UNREADABLE:
        return  # PyTorch will report the error
    for operator in sorted(used):
        if Operator(operator, caller).exists:
            continue
        module = modules.get(str(operator))
        where = f"the module {module!r}, which" if module else "the module that"
        advice = f"Import {where} defines it, before loading the program."
        if module == "__main__":  # the script that saved the file, which cannot be imported
            advice = (
                "The script that saved the program defines it: move it into a module, and import "
                "the module in both programs, before loading the program."
            )
        raise torchop.OperatorNotFoundError(
            f"{what} uses the operator {operator}, which is not registered in this process. "
            f"{advice}"
        )
    called_here = set(map(str, used))
    for name, module in modules.items():
        op, _, provider = name.removesuffix("]").partition("[")
        if provider and op in called_here and provider not in {p.name for p in providers_of(op)}:
            warn(
                f"{what} calls {op}, and used the kernel of the provider {provider!r} when the "
                "program was saved. This provider is not registered in this process, so another "
                f"kernel runs. Import the module {module!r} to register it.",
                torchop.ProviderWarning,
            )


def _read_modules(contents: bytes | str, caller: str, entry: str) -> dict[str, str]:
    """Parse JSON that maps operators to modules, or warn and return {} if the JSON is damaged."""
    try:
        modules = json.loads(contents)
        if isinstance(modules, dict) and all(isinstance(m, str) for m in modules.values()):
            return {op: module[:_LONGEST_NAME] for op, module in modules.items()}
    except _UNREADABLE:
        pass
    warn(
        f"{caller}: the entry {entry} of the file is damaged. It names the modules that define the "
        "operators of the program. The program is loaded without it. Export and save the program "
        "again.",
        UserWarning,
    )
    return {}
