"""The operators that a command is about: those of packages, and those that match patterns."""

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
    """Operators, and the modules that another process imports to have them."""

    modules: tuple[str, ...]
    operators: tuple[str, ...]


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds arguments to a command that say which operators; it gets a `Selection`."""

    @functools.wraps(command)
    def selected(names: tuple[str, ...], imports: tuple[str, ...], **options: Any) -> Any:
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


def require(package: str, what: str) -> None:
    """Raises click.ClickException if something needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise click.ClickException(f"{what} needs {package}: {installing('cli')}")


def console() -> Console:
    """Where a command prints; a file or a program does not want lines broken."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=10_000)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; what is too long for a column goes on in its next line, such as a path."""
    folded = [Column(name, overflow="fold") for name in columns]
    table = Table(*folded, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(table)


def file_to_write(*names: str, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option for a file that a command writes at its end.

    Finding out then that it cannot be written would be too late.
    """

    def checked(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
        if path is None:
            return None
        path = path.absolute()  # a program that the command runs may go elsewhere
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"nothing can be written to {path}")
        return path

    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(*names, type=kind, callback=checked, help=help)


def short_place(place: str) -> str:
    """A place, relative to the present folder if it is inside."""
    file, separator, line = place.rpartition(":")
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}{separator}{line}"


def _select(names: Sequence[str], imports: Sequence[str]) -> Selection:
    """Imports packages, and finds their operators.

    Args:
        names: of packages, and patterns of operators, which have `::`. For a pattern, the package
            is imported that is called as the namespace, if there is one.
        imports: more modules to import.

    Raises:
        click.ClickException: a module cannot be imported, or there is no such operator.
    """
    # First, because importing it registers operators that are no package's.
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
    # One that is imported in part registers what that part does.
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
    """The operators of a package: those that it registers, as far as that can be known."""
    import_all([package])
    operators = {name for name in patterns.all_names() if patterns.is_match(name, "*")}
    # What C++ defines has no module: it is the package's if importing that brought it.
    registered = {
        name
        for name in operators
        if registers(package, name) or (name not in before and not modules_of(name))
    }
    if not registered:
        raise click.ClickException(
            f"{package} registers no operator that can be recognized as its own; name them with a "
            f"pattern and what to import: 'namespace::*' --import {package}"
        )
    return registered
