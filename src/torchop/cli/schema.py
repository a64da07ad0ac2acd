"""`python -m torchop schema`: the schemas of a package now, and what changed since."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

import torchop
from torchop.cli.selection import Selection, selecting
from torchop.extend import Argument, Operator, OpName, Schema, short_text

_FORMAT = 1


@click.group()
def schema() -> None:
    """Writes schemas to a file, and compares two such files."""


@schema.command()
@selecting
@click.option(
    "-o",
    "out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. The default is to print.",
)
def dump(selection: Selection, out: Path | None) -> None:
    """Writes the schemas of operators as JSON.

    `schema compare` compares such a file with one of another version.
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
    """Compares two files of `schema dump`, and says what breaks.

    A change breaks exported programs and callers if the new schema is not backward compatible by
    the rule that PyTorch has for its own operators. A change also breaks callers if they pass or
    read a name that is gone. The exit code is 1 if something breaks, and 0 otherwise.
    """
    changes = list(changes_between(_read(old), _read(new)))
    if as_json:
        click.echo(json.dumps([change._asdict() for change in changes], indent=1))
    else:
        _print(changes)
    sys.exit(1 if any(change.breaks for change in changes) else 0)


class Change(NamedTuple):
    """How the schema of one operator changed."""

    op: str
    kind: str  # "added", "removed" or "changed"
    breaks: tuple[str, ...]  # what no longer works, and for whom
    notes: tuple[str, ...]  # what changed, and breaks nobody
    old: str = ""
    new: str = ""


def _print(changes: list[Change]) -> None:
    for change in changes:
        broken = ", which breaks exported programs and callers" if change.breaks else ""
        click.echo(f"{change.op}: {change.kind}{broken}")
        for sign, text in (("-", change.old), ("+", change.new)):
            if text:
                click.echo(f"  {sign} {text}")
        for note in (*change.breaks, *change.notes):
            click.echo(f"    {note}")
    counts = {kind: sum(change.kind == kind for change in changes) for kind in _KINDS}
    broken_count = sum(bool(change.breaks) for change in changes)
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    click.echo(f"operators: {counted}; {broken_count} of these break what was written before")


_KINDS = ("removed", "changed", "added")


def _read(path: Path) -> dict[str, Schema]:
    """The schemas in a file, by operator."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        texts: Mapping[str, Any] = values["schemas"]
        if values["format"] != _FORMAT or not isinstance(texts, dict):
            raise ValueError("its format is of another version")
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
    """What changed, by the names of the operators."""
    for op in sorted({*old, *new}):
        before, after = old.get(op), new.get(op)
        if before is None:
            yield Change(op, "added", (), (), new=str(after))
        elif after is None:
            reason = "there is no such operator any more: keep it, and let it call its successor"
            yield Change(op, "removed", (reason,), (), old=str(before))
        elif str(before) != str(after):
            yield _change(op, before, after)


def _change(op: str, old: Schema, new: Schema) -> Change:
    is_compatible = new.is_backward_compatible(old)
    differences = list(_differences(old, new, is_compatible))
    breaks = [text for text, is_breaking in differences if is_breaking and not is_compatible]
    notes = [text for text, _ in differences if text not in breaks]
    if not (breaks or is_compatible):
        breaks = ["PyTorch does not regard the new schema as backward compatible"]
    return Change(op, "changed", tuple(breaks), tuple(notes), str(old), str(new))


def _differences(old: Schema, new: Schema, is_compatible: bool) -> Iterator[tuple[str, bool]]:
    """What differs, in words, and whether it is what breaks an incompatible schema."""
    before, after = ({a.name: a for a in schema.arguments} for schema in (old, new))
    renamed = {
        earlier.name: later.name
        for earlier, later in zip(old.arguments, new.arguments, strict=False)
        if earlier.name not in after and later.name not in before and earlier.kind == later.kind
    }
    for name, later_name in renamed.items():
        yield f"argument {name!r} is called {later_name!r} now: calls that name it fail", True
    types_before, types_after = old.written_types, new.written_types
    for name, argument in before.items():
        if name in after:
            if types_before[name] != types_after[name]:
                yield _type_difference(name, types_before[name], types_after[name])
            yield from _argument_differences(argument, after[name])
        elif name not in renamed:
            yield f"argument {name!r} is gone: calls that pass it fail", True
    names = list(after)
    for index, (name, argument) in enumerate(after.items()):
        if name in before or name in renamed.values():
            continue
        is_new = f"argument {name!r} is new"
        if not argument.has_default:
            yield f"{is_new}, without a default: calls without it fail", True
        elif not is_compatible and any(later in before for later in names[index:]):
            yield f"{is_new}, and stands before older ones: put it after them", True
        else:
            yield f"{is_new}; calls without it get {_default(argument)}", False
    if [name for name in before if name in after] != [name for name in after if name in before]:
        yield "the arguments are in another order: those passed by position move", True
    for results in (_types_of_results, _text_of_results):
        if results(old) != results(new):
            yield f"it returns {results(new)}, and returned {results(old)}", True
            break


def _type_difference(name: str, old: str, new: str) -> tuple[str, bool]:
    difference = f"argument {name!r} is of type {new}, and was of type {old}"
    if old.replace("SymInt", "int") == new:
        return (
            f"{difference}: compilers make a graph for one value of it, so a dynamic size that is "
            "passed there becomes fixed"
        ), False
    if re.sub(r"\[\d+\]", "[]", old) == new:
        return f"{difference}: calls that pass one number for the whole list fail", True
    return difference, new not in (f"{old}?", "Scalar", old.replace("int", "SymInt"))


def _argument_differences(old: Argument, new: Argument) -> Iterator[tuple[str, bool]]:
    name = f"argument {old.name!r}"
    if new.is_mutated and not old.is_mutated:
        yield f"{name} is written now: the tensors of callers change", True
    if old.is_mutated and not new.is_mutated:
        yield f"{name} is not written any more: callers read what was there before", True
    if new.keyword_only and not old.keyword_only:
        yield f"{name} is keyword-only now: calls that pass it by position fail", True
    if old.keyword_only and not new.keyword_only:
        yield f"{name} may be passed by position now", False
    if old.has_default and not new.has_default:
        yield f"{name} has no default any more: calls without it fail", True
    elif new.has_default and not old.has_default:
        yield f"{name} may be left out now, and is {_default(new)} then", False
    elif _default(old) != _default(new):
        changed = f"{name} is {_default(new)} by default, and was {_default(old)}"
        problem = "calls without it, which exported programs hold too, mean something else"
        yield f"{changed}: {problem}", True


def _default(argument: Argument) -> str:
    return short_text(repr(argument.default))


def _types_of_results(schema: Schema) -> str:
    return ", ".join(schema.returns) or "nothing"


def _text_of_results(schema: Schema) -> str:
    """With the names of results, and what they alias."""
    return schema.text.rpartition(" -> ")[2]
