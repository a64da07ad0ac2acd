"""`python -m torchop doctor`: the state of the native call path, and what is missing."""

from __future__ import annotations

import platform
import sys

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchop import NativeUnavailableError
from torchop._native.extension import api as native
from torchop._native.extension import files, recipe, worker


@click.command()
def doctor() -> None:
    """Says whether fast calls work on this machine, and if not, why.

    Fast calls need the native call path, which is compiled C++ code. If there is none, because a
    build failed within the last day, the command builds it again. The exit code is 0 if the native
    call path works, and 1 otherwise.
    """
    usable = False
    try:
        compiler = recipe.find_compiler()
        command, build = worker.printable(" ".join(compiler.command)), compiler.build
    except NativeUnavailableError as error:
        command, build = str(error), "any, because there is no compiler"
    rows = [
        ("torch", torch.__version__),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("compiler", command),
        ("TORCHOP_NATIVE", native.mode()),
    ]
    try:
        made = recipe.make_recipe()
    except NativeUnavailableError as error:
        rows.append(("sources", str(error)))
    else:
        problem = recipe.unknown_nodes()
        gradients = f"left to the dispatcher: {problem}" if problem else "recorded natively"
        rows += [("key", made.key), ("build", build), ("gradients", gradients)]
        failure = native.earlier_failure(made)
        places, usable = _places(made)
        retried = []
        if failure is not None and not usable:
            retried = [("tried again", _try_again())]
            places, usable = _places(made)
        rows += [*places, ("last failure", failure or "none on record"), *retried]
    table = Table("what", "found", box=None, pad_edge=False)
    table.columns[1].overflow = "fold"  # a path is copied whole
    for what, found in rows:
        table.add_row(what, Text(found))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # a file or a program does not want lines broken
    console.print(table)
    console.print()
    console.print(Text(_verdict(usable)), soft_wrap=True)
    sys.exit(0 if usable and native.mode() != "0" else 1)


def _places(made: recipe.Recipe) -> tuple[list[tuple[str, str]], bool]:
    """What is in each place for an extension, and whether a program can use one."""
    rows, used = [], False
    for place in files.places(made, any_build=native.mode() == "prebuilt"):
        if place.problem is not None:
            found = place.problem
        elif place.file is None:
            keys = files.keys_in(place.folder)
            others = f"; the folder has {keys}" if keys else ""
            found = f"{place.folder}: not there{others}"
        elif used:
            found = f"{place.folder}: there, but not needed"
        else:
            # A process should not load two copies of one extension, so the others are not tried.
            problem = _problem_of(place)
            used = problem is None
            outcome = "there, and can be loaded" if used else f"cannot be loaded: {problem}"
            found = f"{place.folder}: {outcome}"
        rows.append((place.name, found))
    return rows, used


def _problem_of(place: files.Place) -> str | None:
    try:
        place.load()
    except Exception as error:
        return worker.printable(str(error))
    return None


def _try_again() -> str:
    if native.mode() in ("0", "prebuilt"):
        return f"no: with TORCHOP_NATIVE={native.mode()}, nothing is compiled"
    try:
        native.build()
    except NativeUnavailableError as error:
        return f"it failed again: {error}"
    return "it was compiled"


def _verdict(usable: bool) -> str:
    if native.mode() == "0":
        return "The native call path is turned off by TORCHOP_NATIVE=0."
    if usable:
        return "The native call path can be used."
    return (
        "The native call path cannot be used yet. `python -m torchop build` compiles it, or says "
        "why that fails."
    )
