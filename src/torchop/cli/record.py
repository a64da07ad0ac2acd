"""`python -m torchop record`: run a program, and record the operators that it calls."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import pkgutil
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import click

import torchop
from torchop import Recorded
from torchop._accelerate.patterns import why_nothing_matches
from torchop.cli.accelerate import recording, rows_of_recorded, table
from torchop.cli.selection import file_to_write


@click.command(context_settings={"allow_interspersed_args": False})
@file_to_write(
    "-o",
    "out",
    help="Write the calls to a file, for `accelerate --recorded`. By default, print a report.",
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as with `python -m`.")
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    help="The operators to record, such as 'mylib::*'. By default, all operators.",
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def record(
    out: Path | None,
    is_module: bool,
    patterns: tuple[str, ...],
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a program, and record the operators that it calls.

    Runs the program as `python PROGRAM ARGUMENTS` would. When it ends, even with an error, the
    command writes the calls to a file, or prints a report. The report shows which operators
    `torchop.accelerate` would make faster, and by how much. To measure this, the command calls each
    operator again in a separate process, with tensors of ones. The exit code is the program's.
    """
    if not is_module and not os.path.exists(program):
        raise click.BadParameter(f"there is no file {program}", param_hint="PROGRAM")
    wanted = patterns or ("*",)
    try:
        recorded = torchop.record(*wanted)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--pattern") from None
    ending: BaseException | None = None
    try:
        with _worker_recordings(recorded, wanted), recording(recorded):
            _run(program, arguments, is_module)
    except BaseException as error:
        ending = error
    if not _finish(recorded, wanted, out) and ending is None:
        ending = SystemExit(1)
    if isinstance(ending, SystemExit):
        raise ending
    if ending is not None:
        # Print the traceback without torchop's frames, as Python would print it if it ran the
        # program itself. Raising the exception again is not enough, because click would report the
        # exception differently.
        traceback = _of_program(ending.__traceback__)
        sys.excepthook(type(ending), ending.with_traceback(traceback), traceback)
        sys.exit(130 if isinstance(ending, KeyboardInterrupt) else 1)


@contextlib.contextmanager
def _worker_recordings(recorded: Recorded, patterns: tuple[str, ...]) -> Iterator[None]:
    """Add the calls that the pytest plugin records in the worker processes of pytest-xdist."""
    with tempfile.TemporaryDirectory(prefix="torchop-") as folder:
        os.environ["TORCHOP_RECORD_FOLDER"] = folder
        os.environ["TORCHOP_RECORD_PATTERNS"] = json.dumps(patterns)
        try:
            yield
        finally:
            os.environ.pop("TORCHOP_RECORD_FOLDER", None)
            os.environ.pop("TORCHOP_RECORD_PATTERNS", None)
            for file in sorted(Path(folder).glob("*.json")):
                recorded.update(Recorded.load(file))


def _run(program: str, arguments: tuple[str, ...], is_module: bool) -> None:
    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    is_safe = getattr(sys.flags, "safe_path", False)
    if os.path.isfile(program) and not is_safe:
        sys.path[0] = os.path.dirname(os.path.realpath(program))
    # Do not use runpy.run_path, because it would set `sys.argv[0]`, `__file__` and `sys.path[0]` to
    # the relative path, which becomes wrong once the program changes its working directory.
    path = os.path.join(os.getcwd(), program)
    importer: Any = pkgutil.get_importer(path)
    spec = importer and importer.find_spec("__main__")
    if spec is not None:  # a folder or a zip file
        sys.path[: 0 if is_safe else 1] = [path]
        main, code = module_from_spec(spec), spec.loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
        main = ModuleType("__main__")
        vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    vars(main)["__builtins__"] = builtins
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(code, vars(main))
    finally:
        sys.modules["__main__"] = before


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in (__file__, runpy.__file__) and not file.startswith("<frozen "):
            break
        traceback = traceback.tb_next
    return traceback


def _save_temporary(recorded: Recorded) -> str:
    """Save a recording in a temporary folder in case the report fails, and return the folder."""
    folder = ""
    with contextlib.suppress(OSError):  # the report works without the file
        folder = tempfile.mkdtemp(prefix="torchop-")
        path = Path(folder, "calls.json")
        recorded.save(path)
        click.echo(f"torchop: measuring; meanwhile, the recording is in {path}", err=True)
    return folder


def _finish(recorded: Recorded, patterns: tuple[str, ...], out: Path | None) -> bool:
    if out is not None:
        calls = sum(map(recorded.calls, recorded))
        try:
            recorded.save(out)
        except OSError as error:
            click.echo(f"Error: the recording cannot be written: {error}", err=True)
            return False
        click.echo(f"torchop: wrote {out} (calls: {calls}, operators: {len(recorded)})", err=True)
    elif recorded:
        folder = _save_temporary(recorded)
        click.echo(table(rows_of_recorded(recorded, patterns), recorded, recorded))
        shutil.rmtree(folder, ignore_errors=True)
    else:
        click.echo(f"the program called no operator that matches {', '.join(patterns)}")
    if not recorded:
        click.echo(
            "Warning: nothing was recorded. Calls in other processes are recorded only in worker "
            "processes of pytest-xdist.",
            err=True,
        )
    for pattern in patterns:
        if problem := why_nothing_matches("record", pattern):
            click.echo(problem, err=True)
    return True
