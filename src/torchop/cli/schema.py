"""`python -m torchop schema`: write the schemas of a package, and compare two versions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

import torchop
from torchop.cli.selection import Selection, selecting
from torchop.extend import Operator, OpName, Schema, short_text

_FORMAT = 1


@click.group()
def schema() -> None:
    """Write schemas to a file, and compare two of these files."""


@schema.command()
@selecting
@click.option(
    "-o",
    "out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. By default, print the schemas.",
)
def dump(selection: Selection, out: Path | None) -> None:
    """Write the schemas of operators as JSON.

    Use `schema compare` to compare the output for two versions of a package.
    """
    texts = {op: Operator(op, "dump").schema.text for op in selection.operators}
    versions = {"torchop": torchop.__version__, "torch": str(torch.__version__)}
    values = {"format": _FORMAT, "versions": versions, "schemas": texts}
    text = json.dumps(values, indent=1) + "\n"
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


@schema.command()
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(old: Path, new: Path, as_json: bool) -> None:
    """Compare two files written by `schema dump`, and report breaking changes.

    A change is breaking if the new schema is not backward compatible by PyTorch's rule for ATen
    operators, so that exported programs and callers fail. The exit code is 1 if a change is
    breaking, and 0 otherwise.
    """
    changes = list(changes_between(_read(old), _read(new)))
    if as_json:
        click.echo(json.dumps([change._asdict() for change in changes], indent=1))
    else:
        _print(changes)
    sys.exit(1 if any(change.breaks for change in changes) else 0)


class Change(NamedTuple):
    op: str
    kind: str  # "added", "removed" or "changed"
    breaks: bool  # whether the new schema is not backward compatible by PyTorch's rule
    differences: tuple[str, ...]  # one line for each changed argument or result
    old: str = ""
    new: str = ""


def _print(changes: list[Change]) -> None:
    for change in changes:
        broken = ", and breaks exported programs and callers" if change.breaks else ""
        click.echo(f"{change.op}: {change.kind}{broken}")
        for sign, text in (("-", change.old), ("+", change.new)):
            if text:
                click.echo(f"  {sign} {text}")
        for difference in change.differences:
            click.echo(f"    {difference}")
    counts = {kind: sum(change.kind == kind for change in changes) for kind in _KINDS}
    broken_count = sum(change.breaks for change in changes)
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    click.echo(f"operators: {counted}; {broken_count} of these break existing programs")


_KINDS = ("removed", "changed", "added")


def _read(path: Path) -> dict[str, Schema]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        texts: Mapping[str, Any] = values["schemas"]
        if values["format"] != _FORMAT or not isinstance(texts, dict):
            raise ValueError("unknown format version")
        return {op: _parsed(op, text) for op, text in texts.items()}
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise click.ClickException(
            f"{path} is not a file of `schema dump`: {short_text(error)}"
        ) from None


def _parsed(op: str, text: str) -> Schema:
    schema = Schema.parse(text)
    if OpName.parse(schema.text.partition("(")[0]) != OpName.parse(op):
        raise ValueError(f"{op} has the schema of another operator, {short_text(text)}")
    return schema


def changes_between(old: Mapping[str, Schema], new: Mapping[str, Schema]) -> Iterator[Change]:
    for op in sorted({*old, *new}):
        before, after = old.get(op), new.get(op)
        if before is None:
            yield Change(op, "added", False, (), new=str(after))
        elif after is None:
            yield Change(op, "removed", True, (), old=str(before))
        elif str(before) != str(after):
            yield _change(op, before, after)


def _change(op: str, old: Schema, new: Schema) -> Change:
    breaks = not new.is_backward_compatible(old)
    return Change(op, "changed", breaks, tuple(_differences(old, new)), str(old), str(new))


def _differences(old: Schema, new: Schema) -> Iterator[str]:
    before, after = _arguments(old), _arguments(new)
    for name in (*before, *(name for name in after if name not in before)):
        if name not in after:
            yield f"argument {name!r} is removed"
        elif name not in before:
            yield f"argument {name!r} is new"
        elif before[name] != after[name]:
            yield f"argument {name!r}: {before[name]} before, {after[name]} now"
    if [name for name in before if name in after] != [name for name in after if name in before]:
        yield "the arguments are in another order"
    results = [schema.text.rpartition(" -> ")[2] for schema in (old, new)]
    if results[0] != results[1]:
        yield f"results: {results[0]} before, {results[1]} now"


def _arguments(schema: Schema) -> dict[str, str]:
    texts = [text for text in schema.written_arguments if text != "*"]
    return {
        argument.name: f"{text}, keyword-only" if argument.keyword_only else text
        for argument, text in zip(schema.arguments, texts, strict=True)
    }
