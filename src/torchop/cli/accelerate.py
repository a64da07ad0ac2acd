"""`python -m torchop accelerate`: what operators of other packages would gain from native calls."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import click

import torchop
from torchop._compat import compilers
from torchop._errors import RecordingError
from torchop._inspect import call_record
from torchop._inspect.record import Recorded
from torchop.cli import report
from torchop.cli.measure import Kinds
from torchop.cli.record import recording


@click.command()
@click.option(
    "--report",
    "modules",
    required=True,
    multiple=True,
    help="A module to import, which registers the operators.",
)
@click.option(
    "--recorded",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file with the calls of your program, from `record -o` or Recorded.save.",
)
@click.option(
    "--run-recorded",
    is_flag=True,
    help="Time the recorded operators too, by calling them with the recorded arguments.",
)
@click.argument("patterns", nargs=-1)
def accelerate(
    modules: tuple[str, ...], files: tuple[Path, ...], run_recorded: bool, patterns: tuple[str, ...]
) -> None:
    """Shows what `torchop.accelerate` would gain for a package.

    PATTERNS say which operators, such as 'mylib::*'. Without patterns, these are all operators that
    the imported modules register, and those in the recordings.

    An operator is timed if the import called it. With --run-recorded, it is also timed if it is in
    a recording. The table shows the microseconds of one call, before and after. The calls have the
    same kinds of arguments, with tensors of ones. Each operator runs in a process of its own.

    Recorded calls are only listed unless you pass --run-recorded. A file may come from anybody, and
    an operator may do harm with its arguments, such as write to a path in a string.
    """
    wanted = patterns or ("*",)
    # Before the comparison: a first call, or record, would import it, and it registers operators.
    compilers.import_dynamo()
    registered_before = set() if patterns else {row.op for row in report.rows_of(wanted)}
    recorded = _import(modules, wanted)
    called = torchop.record(*wanted)
    called.update(recorded)
    in_files = torchop.record(*wanted)
    for file in files:
        try:
            in_files.update(Recorded.load(file))
        except (OSError, RecordingError) as error:
            raise click.ClickException(str(error)) from None
    recorded.update(in_files)
    rows = {row.op: row for row in report.rows_of(wanted) if row.op not in registered_before}
    rows.update((row.op, row) for row in report.rows_of_recorded(recorded, wanted))
    timed = {op: in_files[op] for op in sorted(in_files) if op in rows and rows[op].accelerated}
    if timed:
        if run_recorded:
            called.update(in_files)
        _tell_calls(timed, run_recorded)
    if rows:
        click.echo(report.table([rows[op] for op in sorted(rows)], recorded, called))
    else:
        names = " and ".join(modules)
        click.echo(f"{names} registers no operator that matches {', '.join(wanted)}")


def _import(modules: tuple[str, ...], wanted: tuple[str, ...]) -> Recorded:
    """Imports the modules, and records what they call; an exception in one ends the command."""
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


def _tell_calls(calls: Mapping[str, Kinds], run_recorded: bool) -> None:
    """Lists the calls in files that are made, or would be with `--run-recorded`."""
    if run_recorded:
        click.echo("torchop: to time the recorded operators, these calls are made:", err=True)
    else:
        click.echo(
            "torchop: the recorded calls are not timed. If you trust the files, --run-recorded "
            "makes these calls:",
            err=True,
        )
    for op, kinds in calls.items():
        for call, _ in kinds:
            click.echo(f"  {op}{call_record.described(call)}", err=True)
