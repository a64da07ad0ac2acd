"""`python -m torchop tuning`: tables of measured kernels, shown, merged, pruned and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from torchop._accelerate.accelerate import aligned
from torchop._errors import NativeUnavailableError
from torchop._native.extension import files
from torchop._rules.providers import measurements, tuned
from torchop._rules.providers.measurements import Measurement, TableError
from torchop.extend import short_text

_TABLE = click.Path(dir_okay=False, path_type=Path)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def tuning() -> None:
    """Shows, merges, prunes and compares tables of measured kernels.

    torchop.tune and torchop.tuning write them. A command that gets no table takes the user's own.
    """


@tuning.command()
@click.argument("table", type=_TABLE, required=False)
@_AS_JSON
def show(table: Path | None, as_json: bool) -> None:
    """Shows what was measured."""
    found = _read(_or_users(table))
    if as_json:
        items = [
            {**m._asdict(), "call": m.call, "kernels": [k._asdict() for k in m.kernels]}
            for m in found
        ]
        click.echo(json.dumps(items, indent=1))
        return
    rows = [("operator", "call", "kernel", "us", "interval", "device", "torch")]
    for m in found:
        for kernel in m.kernels:
            rows.append((m.op, m.call, kernel.label, *kernel.times, m.device, m.torch))
    click.echo(aligned(rows))


@tuning.command()
@click.argument("tables", type=_TABLE, nargs=-1, required=True)
@click.option("--into", type=_TABLE, help="The table to extend; the user's own without it.")
def merge(tables: Sequence[Path], into: Path | None) -> None:
    """Adds the measurements of tables to one; of two for the same calls, the later one stays."""
    given = list(map(_read, tables))
    target = _or_users(into)
    try:
        if into is None:
            files.make_cache_folder()
        with measurements.locked(target):
            before = _read(target) if target.exists() else []
            found = measurements.merged(before, *given)
            measurements.write(target, found)
    except (OSError, NativeUnavailableError) as error:
        raise _unwritable(target, error) from None
    click.echo(f"{target} has {len(found)} measurements, of which {len(before)} were there.")


@tuning.command()
@click.argument("table", type=_TABLE, required=False)
@click.option("--device", help="Remove those of a device, too.")
def prune(table: Path | None, device: str | None) -> None:
    """Removes what was measured with another release of PyTorch."""
    path = _or_users(table)
    _read(path)  # before its folder is asked for
    try:
        with measurements.locked(path):
            found = _read(path)  # again, since another process may have added some
            kept = [m for m in found if m.torch == tuned.torch_release() and m.device != device]
            measurements.write(path, kept)
    except OSError as error:
        raise _unwritable(path, error) from None
    click.echo(f"{path} has {len(kept)} measurements; {len(found) - len(kept)} were removed.")


@tuning.command()
@click.argument("before", type=_TABLE)
@click.argument("after", type=_TABLE)
@_AS_JSON
def compare(before: Path, after: Path, as_json: bool) -> None:
    """Compares the fastest kernels of the calls that two tables have, on whatever devices."""
    earlier = {(m.op, m.call): m for m in _read(before)}
    rows = []
    for m in _read(after):
        if (old := earlier.get((m.op, m.call))) is not None:
            one, other = old.kernels[0], m.kernels[0]
            times = one.microseconds, other.microseconds
            rows.append((m.op, m.call, one.label, times[0], other.label, times[1]))
    names = ("operator", "call", "before", "us before", "after", "us after")
    if as_json:
        click.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1))
    else:
        click.echo(aligned([names, *(tuple(map(str, row)) for row in rows)]))


def _or_users(table: Path | None) -> Path:
    path = table or tuned.users_table()
    if path is None:
        raise click.ClickException("there is no place for a cache; name a table")
    return path


def _read(path: Path) -> list[Measurement]:
    try:
        return measurements.read(path)
    except TableError as error:
        raise click.ClickException(str(error)) from None


def _unwritable(path: Path, error: Exception) -> click.ClickException:
    problem = error.strerror if isinstance(error, OSError) else short_text(error)
    return click.ClickException(f"{path} cannot be written: {problem}")
