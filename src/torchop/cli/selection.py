"""Select the operators of a command by package or pattern, and print tables."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from torchop._accelerate import patterns
from torchop._compat import on_demand
from torchop._inspect.registrant import modules_of, registers
from torchop.cli.child_process import import_all
from torchop.extend import OpName
from torchop.testing._extras import installing


class Selection(NamedTuple):
    """The selected operators, and the modules that a child process imports to register them."""

    modules: tuple[str, ...]
    operators: tuple[str, ...]


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add arguments that select operators to a command, which receives them as a `Selection`."""

    @functools.wraps(command)
    def selected(names: tuple[str, ...], imports: tuple[str, ...], **options: Any) -> Any:
        if options.get("from_tests"):  # the names are the command that runs the tests
            return command(selection=Selection((), names), **options)
        return command(selection=_select(names, imports), **options)

    selected = click.option(
        "--import",
        "imports",
        multiple=True,
        metavar="MODULE",
        help="A module that registers operators. Needed if its name differs from their namespace.",
    )(selected)
    return click.argument("names", nargs=-1, required=True, metavar="PACKAGE_OR_PATTERN...")(
        selected
    )


def require(package: str, what: str, extra: str = "cli") -> None:
    if importlib.util.find_spec(package) is None:
        raise click.ClickException(f"{what} needs {package}: {installing(extra)}")


def console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=10_000)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    folded = [Column(name, overflow="fold") for name in columns]
    table = Table(*folded, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(table)


def file_to_write(*names: str, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a click option for an output file. A path that is not writable is rejected."""

    def checked(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
        if path is None:
            return None
        path = path.absolute()  # because the command may run a program that changes directory
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"{path} cannot be written to")
        return path

    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(*names, type=kind, callback=checked, help=help)


def short_place(place: str) -> str:
    file, separator, line = place.rpartition(":")
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}{separator}{line}"


def _select(names: Sequence[str], imports: Sequence[str]) -> Selection:
    """Import packages and find their operators.

    `names` contains package names and patterns of operator names. For a pattern such as
    `"mylib::*"`, import the package `mylib` if it exists. `imports` contains further modules to
    import.
    """
    # Import Dynamo first, because this import registers operators, which would otherwise be
    # attributed to a package that imports Dynamo.
    on_demand.import_dynamo()
    before = set(patterns.all_names())
    modules = list(imports)
    import_all(imports)
    operators: set[OpName] = set()
    for name in names:
        if "::" in name:
            operators |= _matching(name, modules)
        else:
            modules.append(name)
            operators |= _registered(name, before)
    return Selection(tuple(dict.fromkeys(modules)), tuple(sorted(map(str, operators))))


def _matching(pattern: str, modules: list[str]) -> set[OpName]:
    namespace = pattern.partition("::")[0]
    is_importable = namespace.isidentifier() and (
        namespace in sys.modules or importlib.util.find_spec(namespace) is not None
    )
    # If the user passed modules with --import, assume that these modules register the operators, so
    # there is no need to import the whole package.
    if is_importable and namespace not in modules and not modules:
        import_all([namespace])
        modules.append(namespace)
    names = {name for name in patterns.all_names() if patterns.is_match(name, pattern)}
    if not names:
        command = click.get_current_context().info_name or "torchop"
        problem = patterns.why_nothing_matches(command, pattern) or f"nothing matches {pattern}."
        raise click.ClickException(f"{problem} Name the module that registers it with --import.")
    return names


def _registered(package: str, before: set[OpName]) -> set[OpName]:
    import_all([package])
    operators = {name for name in patterns.all_names() if patterns.is_match(name, "*")}
    # PyTorch does not record which module loaded an operator that is defined in C++, so assume that
    # the package defines the operators that appeared while it was imported.
    registered = {
        name
        for name in operators
        if registers(package, name) or (name not in before and not modules_of(name))
    }
    if not registered:
        raise click.ClickException(
            f"{package} registers no operator that can be recognized as its own. Pass a pattern "
            f"and the module to import: 'namespace::*' --import {package}"
        )
    return registered
