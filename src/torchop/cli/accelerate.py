"""`python -m torchop accelerate`: what operators of other packages would gain from native calls."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

import torchop
from torchop._compat import compilers
from torchop._errors import RecordingError
from torchop._inspect import call_record
from torchop._inspect.record import Recorded
from torchop.cli import report
from torchop.cli.record import recording


@click.command()
@click.option("--report", "modules", required=True, multiple=True, help="A module to import.")
@click.option(
    "--recorded",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Calls of your program, from `record -o` or Recorded.save.",
)
@click.option(
    "--run-recorded",
    is_flag=True,
    help="Call the recorded operators, with the arguments in FILE, to time them.",
)
@click.argument("patterns", nargs=-1)
def accelerate(
    modules: tuple[str, ...], files: tuple[Path, ...], run_recorded: bool, patterns: tuple[str, ...]
) -> None:
    """Imports modules, and prints which operators would be accelerated.

    PATTERNS name the operators; all that the import registers, and those of the recordings, if
    there are none. Those that the import called, and with --run-recorded those of the recordings,
    are timed with arguments of the same kind, whose tensors hold ones: microseconds for a call,
    before and after. Each is called in a process of its own.

    A recording may come from anybody, and an operator may do anything with its arguments, such as
    writing a file of this name. So the calls in FILE are shown, and made with --run-recorded only.
    """
    wanted = patterns or ("*",)
    # A first call, or record, would import it, with operators of its own.
    compilers.import_dynamo()
    known = {row.op for row in report.rows_of(wanted)} if not patterns else set()
    recorded = _import(modules, wanted)
    called = torchop.record(*wanted)
    called.update(recorded)
    of_files = torchop.record(*wanted)
    for file in files:
        _add(of_files, file)
    recorded.update(of_files)
    rows = {row.op: row for row in report.rows_of(wanted) if row.op not in known}
    rows.update((row.op, row) for row in report.rows_of_recorded(recorded, wanted))
    if any(op in rows and rows[op].accelerated for op in of_files):
        if run_recorded:
            called.update(of_files)
        _tell_calls(of_files, rows, run_recorded)
    if rows:
        click.echo(report.table([rows[op] for op in sorted(rows)], recorded, called))
    else:
        names = " and ".join(modules)
        click.echo(f"{names} registers no operator that matches {', '.join(wanted)}")


def _import(modules: tuple[str, ...], wanted: tuple[str, ...]) -> Recorded:
    """Imports the modules; any other error of theirs than that one is missing ends the command."""
    try:
        recorded = torchop.record(*wanted)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    with recording(recorded):
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise click.ClickException(f"{module} cannot be imported: {error}") from None
    return recorded


def _tell_calls(
    of_files: Recorded, rows: dict[str, torchop.AcceleratedOperator], run_recorded: bool
) -> None:
    """Says which calls are made because a file says so, or would be."""
    if run_recorded:
        click.echo("torchop: these recorded calls are made, to time them:", err=True)
    else:
        click.echo(
            "torchop: nothing in a recorded file is called, unless you trust the file and add "
            "--run-recorded. That would make these calls:",
            err=True,
        )
    for op in sorted(of_files):
        if op in rows and rows[op].accelerated:
            for call, _ in of_files[op]:
                click.echo(f"  {op}{call_record.described(call)}", err=True)


def _add(recorded: Recorded, file: Path) -> None:
    try:
        recorded.update(Recorded.load(file))
    except (OSError, RecordingError) as error:
        raise click.ClickException(str(error)) from None
