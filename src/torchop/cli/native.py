"""`python -m torchop build` and `doctor`: the native call path, compiled, and looked for.

`build --wheel` writes `torchop-native`, for machines that should not compile it.
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
from torchop import NativeUnavailableError
from torchop._compat import compile_caches
from torchop._native.extension import api as native
from torchop._native.extension import files, recipe
from torchop._native.extension.build import printable
from torchop.cli.selection import console, print_table, require

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
    help="The folder for the compiled file, to which TORCHOP_NATIVE_DIR can point. The default is "
    "your cache. With --wheel: the folder for the wheel. The default is the working directory.",
)
@click.option("--wheel", is_flag=True, help="Write an installable wheel, torchop-native.")
@click.option("--force", is_flag=True, help="Compile again, even if a compiled file exists.")
def build(out: Path | None, wheel: bool, force: bool) -> None:
    """Compiles the native call path, the C++ code of fast calls.

    Nothing is compiled if a compiled file exists already. The command prints the path of the file.
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
        raise click.ClickException(
            f"{file} is there, but cannot be loaded: {error}.{hint}"
        ) from None
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
    """Writes a wheel with a compiled extension.

    Args:
        extension: the file that the compiler made.
        folder: where to write the wheel; made if there is none.

    Returns:
        The path of the wheel, which is there completely or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Only who asks for a wheel needs this package.
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
    """Which Pythons and machines can install it, such as `cp311-cp311-linux_x86_64`.

    Not `manylinux`, which promises that any distribution can load it: only this one has shown that.
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    threading = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"{python}-{python}{threading}-{platform}"


# --------------------------------------------------------------------------------------------------
# doctor


# What `doctor` says, by the state in which the first call of a program would find the extension.
_VERDICTS: dict[native.State, str] = {
    "off": "The native call path is turned off by TORCHOP_NATIVE=0.",
    "ready": "The native call path can be used.",
    "idle": "Nothing is compiled yet: the first call of an operator does that, in the background, "
    "which takes about 20 s. `python -m torchop build` does it now.",
    "failed": "The native call path cannot be used yet, for a reason that stands above. Operators "
    "work without it, but calls take longer. When the reason is gone, `python -m torchop build` "
    "compiles it, or says why that fails.",
}
_WITHOUT_LOCK = (
    "The native call path is not used, because {}. Operators work without it, but calls take "
    "longer. TORCHOP_NATIVE=require uses it, and turns the GIL on for the whole process."
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Says whether fast calls work on this machine, or why not.

    It also says which caches of compiled graphs do not notice that a rule of an operator changed.

    Fast calls need the native call path, which is compiled C++ code. The exit code is 0 if it can
    be used, or if nothing is compiled yet and the first call will do that, and 1 otherwise.
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
                    f"{folder}: not there, and {there} is read-only. Set TORCHOP_CACHE_DIR to a "
                    "folder that only you can write to"
                )
                state = "failed"
        found |= places
    blind = compile_caches.blind_caches().items()
    notices = [f"{what} do not notice a changed rule: {advice}" for what, advice in blind]
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
    """What is in each place for an extension, and what a program would make of them.

    That is "idle" if nothing is there, and nobody said where something has to be.
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
            found = f"{place.folder}: not there{others}"
        elif used:
            found = f"{place.folder}: there, but not needed"
        else:
            # A process should not load two copies of one extension, so the others are not tried.
            problem = _problem_of(place)
            used = problem is None
            outcome = "there, and can be loaded" if used else f"cannot be loaded: {problem}"
            found = f"{place.folder}: {outcome}"
        rows[place.name] = found
    is_empty = all(place.file is None and place.problem is None for place in places)
    is_chosen = any(place.name == "TORCHOP_NATIVE_DIR" for place in places)
    return rows, "ready" if used else "idle" if is_empty and not is_chosen else "failed"


def _problem_of(place: files.Place) -> str | None:
    if (problem := _lock_problem()) is not None:
        return problem  # a command that only looks must not turn the lock on, either
    try:
        assert place.file is not None
        files.load(place.file)
    except Exception as error:
        return printable(str(error))
    return None


def _lock_problem() -> str | None:
    """Why a program leaves the extension alone, although it may be there; None if it does not."""
    return recipe.lock_problem() if native.mode() in ("auto", "prebuilt") else None
