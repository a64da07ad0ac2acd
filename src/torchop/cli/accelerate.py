"""`python -m torchop accelerate`: show how much time an operator saves without the dispatcher."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

import torchop
from torchop import NothingToAccelerateWarning, Recorded
from torchop._accelerate.accelerate import aligned
from torchop._accelerate.patterns import is_match
from torchop._compat import on_demand
from torchop._inspect import call_record
from torchop.cli.child_process import import_all
from torchop.cli.measure import Kinds, Measurement, accelerated, measure
from torchop.extend import OpName

_COLUMNS = ("operator", "accelerated", "calls", "native", "before", "after", "reason")


@click.command()
@click.option(
    "--report",
    "modules",
    required=True,
    multiple=True,
    help="A module that registers operators; it is imported. Repeat the option for several.",
)
@click.option(
    "--recorded",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file with your program's calls, from `record -o` or Recorded.save.",
)
@click.option(
    "--run-recorded",
    is_flag=True,
    help="Also time the recorded operators, by calling them with the recorded arguments.",
)
@click.argument("patterns", nargs=-1)
def accelerate(
    modules: tuple[str, ...], files: tuple[Path, ...], run_recorded: bool, patterns: tuple[str, ...]
) -> None:
    """Show how much faster `torchop.accelerate` makes the operators of a package.

    PATTERNS select operators, such as 'mylib::*'. By default, these are all operators that the
    imported modules register, and the operators in the recordings.

    An operator is timed if the modules call it while they are imported. With --run-recorded, an
    operator is also timed if it is in a recording. The table shows how many microseconds a call
    takes before and after acceleration. The timed calls use the recorded arguments, but with
    tensors of ones, and each operator runs in a separate process.

    Without --run-recorded, recorded calls are only listed, because a file may come from an
    untrusted source, and a call with its arguments can do harm, for example write to the path in a
    string.
    """
    wanted = patterns or ("*",)
    # Dynamo registers operators when it is imported, often as late as in the first call. Import
    # Dynamo before computing `registered_before`, so that its operators are not in the table.
    on_demand.import_dynamo()
    registered_before = set() if patterns else {row.op for row in rows_of(wanted)}
    imported = _import(modules, wanted)
    in_files, recorded = torchop.record(*wanted), torchop.record(*wanted)
    for file in files:
        try:
            in_files.update(Recorded.load(file))
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from None
    for part in (imported, in_files):
        recorded.update(part)
    rows = {row.op: row for row in rows_of(wanted) if row.op not in registered_before}
    rows.update((row.op, row) for row in rows_of_recorded(recorded, wanted))
    timed = {op: in_files[op] for op in sorted(in_files) if op in rows and rows[op].accelerated}
    if timed:
        _print_calls(timed, run_recorded)
    if rows:
        called = recorded if run_recorded else imported
        click.echo(table([rows[op] for op in sorted(rows)], recorded, called))
    else:
        names = " and ".join(modules)
        click.echo(f"{names} registers no operator that matches {', '.join(wanted)}")


def _import(modules: tuple[str, ...], wanted: tuple[str, ...]) -> Recorded:
    try:
        recorded = torchop.record(*wanted)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    with recording(recorded):
        import_all(modules)
    return recorded


def _print_calls(calls: Mapping[str, Kinds], run_recorded: bool) -> None:
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
            click.echo(f"  {op}{call_record.described(op, call)}", err=True)


@contextlib.contextmanager
def recording(recorded: Recorded) -> Iterator[None]:
    """Record the calls in the block, without a warning if there are none.

    The commands that use this function report an empty recording themselves.
    """
    recorded.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingToAccelerateWarning)
            recorded.__exit__(None, None, None)


def rows_of(patterns: tuple[str, ...]) -> tuple[torchop.AcceleratedOperator, ...]:
    """Accelerate matching operators temporarily, and return a table row for each of them."""
    with accelerated(*patterns) as acceleration:
        return acceleration.operators


def rows_of_recorded(
    recorded: Recorded, patterns: tuple[str, ...]
) -> tuple[torchop.AcceleratedOperator, ...]:
    """Return a table row for each recorded operator, even if it is not registered."""
    names = [op for op in recorded if any(is_match(OpName.parse(op), p) for p in patterns)]
    rows = {row.op: row for row in (rows_of(tuple(names)) if names else ())}
    missing = "it is not registered here; import the module that registers it, with --report"
    return tuple(
        rows.get(op, torchop.AcceleratedOperator(op, False, missing)) for op in sorted(names)
    )


def table(rows: Sequence[torchop.AcceleratedOperator], recorded: Recorded, called: Recorded) -> str:
    """Format a table with the time of a call before and after acceleration, and the time saved.

    `recorded` contains all recorded calls, from which the numbers of calls are computed. `called`
    contains only the calls that this process may run, and therefore time.
    """
    measurements = measure(
        {row.op: called[row.op] for row in rows if row.accelerated and row.op in called}
    )
    lines: list[tuple[str, ...]] = [_COLUMNS]
    savings = []
    for row in rows:
        calls = recorded.calls(row.op)
        native, cost, problem = measurements.get(row.op, Measurement())
        # `calls` includes calls whose arguments were not recorded. Assume that the share of native
        # calls, which bypass the dispatcher, is the same among them as among the recorded calls.
        native_calls = round((native or 0.0) * calls)
        before = after = ""
        reason = row.reason or (f"not measured: {problem}" if problem else "")
        if cost is not None:
            before, after = f"{cost.before:.2f}", f"{cost.after:.2f}"
            savings.append(0.0 if cost.is_noise else native_calls * (cost.before - cost.after))
            if cost.is_noise:
                reason = "before and after differ by no more than the noise"
        yes = "yes" if row.accelerated else "no"
        share = "" if native is None else str(native_calls)
        lines.append((row.op, yes, str(calls or ""), share, before, after, reason))
    if not savings:
        return aligned(lines)
    saved = _duration(sum(savings))
    return f"{aligned(lines)}\n\nIn the recorded calls, this saves {saved}."


def _duration(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= size:
            return f"{microseconds / size:.2f} {unit}"
    return f"{microseconds:.2f} us"
