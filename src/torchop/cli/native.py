"""`python -m torchop build` and `doctor`: compile and diagnose the native call path.

`build --wheel` writes the package `torchop-native` for machines without a compiler.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import click
import torch
from rich.text import Text

import torchop
from torchop._compat import compile_caches
from torchop._native.extension import api as native
from torchop._native.extension import files, recipe
from torchop._native.extension.build import printable
from torchop.cli.selection import console, print_table, require
from torchop.native import NativeUnavailableError

_METADATA = """\
Metadata-Version: 2.1
Name: torchop-native
Version: {version}
Summary: The native call path of torchop, compiled for PyTorch {torch}.
Requires-Dist: torch==={torch}
Requires-Dist: torchop=={torchop}
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: torchop {torchop}
Root-Is-Purelib: false
Tag: {tag}
"""


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for the compiled file, to use with TORCHOP_NATIVE_DIR. By default, your cache "
    "folder. With --wheel: the folder for the wheel; by default, the working directory.",
)
@click.option("--wheel", is_flag=True, help="Write an installable wheel, torchop-native.")
@click.option("--force", is_flag=True, help="Compile even if a compiled file exists.")
def build(out: Path | None, wheel: bool, force: bool) -> None:
    """Compile the native call path: the C++ code for fast calls.

    An existing compiled file is reused. The command prints the path of the file.
    """
    start = time.monotonic()
    wheel_folder = Path() if out is None else out
    if wheel:
        require("wheel", "writing a wheel")
        out = None
    try:
        file = native.build(out, force=force)
        files.load(file)
    except NativeUnavailableError as error:
        raise click.ClickException(f"the native call path cannot be built: {error}") from None
    except Exception as error:
        hint = "" if force else " `python -m torchop build --force` compiles it again."
        raise click.ClickException(f"{file} exists, but cannot be loaded: {error}.{hint}") from None
    if wheel:
        try:
            file = _write_wheel(file, wheel_folder)
        except OSError as error:
            raise click.ClickException(
                f"the wheel cannot be written to {wheel_folder}: {error.strerror}"
            ) from None
    click.echo(file)
    click.echo(f"{time.monotonic() - start:.1f} seconds", err=True)


def _write_wheel(extension: Path, folder: Path) -> Path:
    """Write a wheel that contains the compiled file `extension`, and return the wheel's path.

    The wheel is written to a temporary folder first, so an incomplete wheel is never visible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Import wheel only here, because it is an optional dependency.
    wheel_file = importlib.import_module("wheel.wheelfile").WheelFile
    version = f"{torchop.__version__}+torch{re.sub(r'[^A-Za-z0-9]+', '.', torch.__version__)}"
    values = {
        "version": version,
        "torch": torch.__version__,
        "torchop": torchop.__version__,
        "tag": _tag(),
    }
    name = f"torchop_native-{version}"
    contents: dict[str, str | bytes] = {
        f"{name}.dist-info/METADATA": _METADATA.format(**values),
        f"{name}.dist-info/WHEEL": _WHEEL.format(**values),
    }
    contents[f"{files.WHEEL_PACKAGE}/{extension.name}"] = extension.read_bytes()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch, f"{name}-{values['tag']}.whl")
        with wheel_file(written, "w") as archive:
            for path, content in contents.items():
                archive.writestr(path, content)
        return written.replace(folder / written.name)


def _tag() -> str:
    """Return the wheel's tag, such as `cp311-cp311-linux_x86_64`.

    The wheel is not tagged `manylinux`, because the compiled file may depend on libraries of the
    Linux distribution on which it was compiled.
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    threading = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"{python}-{python}{threading}-{platform}"


# The last line of the report, for each state of the native call path.
_VERDICTS: dict[native.State, str] = {
    "off": "The native call path is turned off by TORCHOP_NATIVE=0.",
    "ready": "The native call path works.",
    "idle": "The native call path is not compiled yet. In a program that calls operators 1,000 "
    "times, a background thread compiles it, in about 20 s. `python -m torchop build` compiles it "
    "now.",
    "failed": "The native call path cannot be used, for the reason above. Operators work without "
    "it, but calls take longer. Fix the problem, then run `python -m torchop build`, which "
    "compiles it or explains the failure.",
}
_WITHOUT_LOCK = (
    "The native call path is not used, because {}. Operators work without it, but calls take "
    "longer. TORCHOP_NATIVE=require uses it, and turns the GIL on for the whole process."
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Report whether fast calls work on this machine, or why not.

    Fast calls need the native call path, which is compiled C++ code. The exit code is 0 if it
    works, or if it can be compiled, and 1 otherwise.

    The report also lists compile caches that do not notice when an operator's rules, such as its
    fake kernel, change.
    """
    state: native.State = "failed"
    try:
        command = printable(" ".join(recipe.find_compiler()))
        can_compile = native.mode() != "prebuilt"
    except NativeUnavailableError as error:
        command, can_compile = str(error), False
    found = {
        "torch": torch.__version__,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "compiler": command,
        "TORCHOP_NATIVE": native.mode(),
    }
    try:
        made = recipe.make_recipe()
    except NativeUnavailableError as error:
        found["sources"] = str(error)
    else:
        nodes = recipe.unknown_nodes()
        gradients = f"left to the dispatcher: {nodes}" if nodes else "recorded natively"
        found |= {"key": made.key, "gradients": gradients}
        places, state = _places(made)
        if state == "idle" and not can_compile:
            state = "failed"
        if state == "idle":
            folder = files.cache_folder()
            there = next(each for each in (folder, *folder.parents) if os.path.isdir(each))
            if not os.access(there, os.W_OK | os.X_OK):
                places["cache"] = (
                    f"{folder}: does not exist, and {there} is read-only. Set TORCHOP_CACHE_DIR to "
                    "a folder that only you can write to"
                )
                state = "failed"
        found |= places
    uncovered = compile_caches.uncovered_caches().items()
    notices = [f"{cache} do not notice a changed rule: {advice}" for cache, advice in uncovered]
    found["compile caches"] = "\n".join(notices) or "notice a changed rule"
    problem = _lock_problem()
    if native.mode() == "0" or problem is not None:
        state = "off"
    verdict = _VERDICTS[state] if problem is None else _WITHOUT_LOCK.format(problem)
    if as_json:
        report = {"state": state, "verdict": verdict, "found": found}
        click.echo(json.dumps(report, indent=1))
    else:
        print_table(("what", "found"), found.items())
        console().print(Text(f"\n{verdict}"), soft_wrap=True)
    sys.exit(0 if state in ("ready", "idle") else 1)


def _places(made: recipe.Recipe) -> tuple[dict[str, str], native.State]:
    """Describe each place that may contain the extension, and return the resulting state as well.

    If all places are empty and the user did not set TORCHOP_NATIVE_DIR, the state is "idle", which
    means that the extension has yet to be compiled.
    """
    rows: dict[str, str] = {}
    used = False
    places = files.places(made)
    for place in places:
        if place.problem is not None:
            found = place.problem
        elif place.file is None:
            keys = files.keys_in(place.folder)
            others = f"; the folder has {keys}" if keys else ""
            found = f"{place.folder}: not found{others}"
        elif used:
            found = f"{place.folder}: found, but not needed"
        else:
            # A process must not load two extensions, so stop at the first one that can be loaded.
            problem = _problem_of(place)
            used = problem is None
            outcome = "found, and can be loaded" if used else f"cannot be loaded: {problem}"
            found = f"{place.folder}: {outcome}"
        rows[place.name] = found
    is_empty = all(
        place.file is None and (place.problem is None or place.name == files.WHEEL)
        for place in places
    )
    is_chosen = any(place.name == files.CHOSEN for place in places)
    return rows, "ready" if used else "idle" if is_empty and not is_chosen else "failed"


def _problem_of(place: files.Place) -> str | None:
    if (problem := _lock_problem()) is not None:
        return problem  # without loading the extension, because this would enable the GIL
    try:
        assert place.file is not None
        files.load(place.file)
    except Exception as error:
        return printable(str(error))
    return None


def _lock_problem() -> str | None:
    return recipe.lock_problem() if native.mode() in ("auto", "prebuilt") else None
