"""`python -m torchop doctor`: the state of the native call path, and what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchop._errors import NativeUnavailableError
from torchop._native.extension import api as native
from torchop._native.extension import files, worker
from torchop._native.extension.recipe import Recipe, find_compiler, make_recipe, unknown_nodes


@click.command()
def doctor() -> None:
    """Says whether fast calls work on this machine, and if not, why.

    Fast calls need the native call path, which is compiled C++ code. If there is none, because a
    build failed within the last day, the command builds it again. The exit code is 0 if the native
    call path works, and 1 otherwise.
    """
    usable = False
    table = Table("what", "found", box=None, pad_edge=False)
    table.columns[1].overflow = "fold"  # a path is copied whole
    for what, found in _machine():
        table.add_row(what, Text(found))
    try:
        recipe = make_recipe()
    except NativeUnavailableError as error:
        table.add_row("sources", Text(str(error)))
    else:
        table.add_row("key", recipe.key)
        table.add_row("build", Text(_build()))
        table.add_row("gradients", Text(_gradients()))
        failure = native.earlier_failure(recipe)
        places = list(_places(recipe))
        usable = any(loads for _, _, loads in places)
        retried = None
        if failure is not None and not usable:
            retried = _try_again()
            places = list(_places(recipe))
            usable = any(loads for _, _, loads in places)
        for what, found, _ in places:
            table.add_row(what, Text(found))
        table.add_row("last failure", Text(failure or "none on record"))
        if retried is not None:
            table.add_row("tried again", Text(retried))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # a file or a program does not want lines broken
    console.print(table)
    console.print()
    console.print(Text(_verdict(usable)), soft_wrap=True)
    sys.exit(0 if usable and native.mode() != "0" else 1)


def _machine() -> Iterator[tuple[str, str]]:
    yield "torch", torch.__version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    try:
        yield "compiler", worker.printable(" ".join(find_compiler().command))
    except NativeUnavailableError as error:
        yield "compiler", str(error)
    yield "TORCHOP_NATIVE", native.mode()


def _build() -> str:
    try:
        return find_compiler().build
    except NativeUnavailableError:
        return "any, because there is no compiler"


def _gradients() -> str:
    problem = unknown_nodes()
    return "recorded natively" if problem is None else f"left to the dispatcher: {problem}"


def _places(recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """What is in each place for an extension, and whether a program would use it."""
    used = False
    for place in files.places(recipe, any_build=native.mode() == "prebuilt"):
        if place.problem is not None:
            yield place.name, place.problem, False
        elif place.file is None:
            keys = files.keys_in(place.folder)
            others = f"; the folder has {keys}" if keys else ""
            yield place.name, f"{place.folder}: not there{others}", False
        elif used:
            yield place.name, f"{place.folder}: there, but not needed", False
        else:
            # A process should not load two copies of one extension, so the others are not tried.
            problem = _problem_of(place)
            used = problem is None
            outcome = "there, and can be loaded" if used else f"cannot be loaded: {problem}"
            yield place.name, f"{place.folder}: {outcome}", used


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
