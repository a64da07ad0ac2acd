"""`python -m torchop accelerate`: what operators of other packages would gain from native calls."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

import torchop
from torchop._compat import compilers
from torchop._errors import RecordingError
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
@click.argument("patterns", nargs=-1)
def accelerate(
    modules: tuple[str, ...], files: tuple[Path, ...], patterns: tuple[str, ...]
) -> None:
    """Imports modules, and prints which operators would be accelerated.

    PATTERNS name the operators; all that the import registers, and those of the recordings, if
    there are none. Those that were called, in a recording or by the import, are timed with
    arguments of the same kind, whose tensors hold ones: microseconds for a call, before and after.
    """
    wanted = patterns or ("*",)
    # A first call, or record, would import it, with operators of its own.
    compilers.import_dynamo()
    known = {row.op for row in report.rows_of(wanted)} if not patterns else set()
    recorded = _import(modules, wanted)
    for file in files:
        _add(recorded, file)
    rows = {row.op: row for row in report.rows_of(wanted) if row.op not in known}
    rows.update((row.op, row) for row in report.rows_of_recorded(recorded, wanted))
    if rows:
        click.echo(report.table([rows[op] for op in sorted(rows)], recorded))
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


def _add(recorded: Recorded, file: Path) -> None:
    try:
        recorded.update(Recorded.load(file))
    except (OSError, RecordingError) as error:
        raise click.ClickException(str(error)) from None
