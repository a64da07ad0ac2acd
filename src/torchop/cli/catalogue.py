"""`python -m torchop list`: list operators with their schemas, kernels, rules and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

import torchop
from torchop._inspect.registrant import in_dispatcher, place_of
from torchop.cli.selection import Selection, print_table, selecting, short_place
from torchop.extend import Operator


class Entry(NamedTuple):
    op: str
    schema: str
    kernels: list[str]  # the devices or dispatch keys with a kernel
    rules: list[str]
    where: str  # the file and line of the function, or else of the registration
    examples: bool  # whether examples are registered, which `check` needs
    checked: str = ""  # such as "3 passed", from the report of --checked


@click.command("list")
@selecting
@click.option(
    "--checked",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JSON report of `check` or pytest, to add a column with the outcomes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def catalogue(selection: Selection, checked: Path | None, as_json: bool) -> None:
    """List operators with their kernels and rules, and whether they are tested.

    Each row has the schema, the devices with kernels, the registered rules (such as fake kernels
    and formulas), the tests, and the file and line of the definition.
    """
    outcomes = {} if checked is None else _outcomes(checked)
    entries = [entry_of(op)._replace(checked=outcomes.get(op, "")) for op in selection.operators]
    if as_json:
        click.echo(json.dumps([entry._asdict() for entry in entries], indent=1))
        return
    columns = ("operator", "kernels", "rules", "tested", "where")
    print_table(columns, (_cells(entry, with_checked=checked is not None) for entry in entries))


def _cells(entry: Entry, with_checked: bool) -> tuple[str, ...]:
    tested = entry.checked or ("not checked" if with_checked else "")
    if not entry.examples:
        tested = f"{tested}, no examples" if entry.checked else "no examples"
    kernels, rules = ", ".join(entry.kernels) or "none", "; ".join(entry.rules) or "none"
    return entry.schema, kernels, rules, tested or "has examples", entry.where


def _outcomes(path: Path) -> Mapping[str, str]:
    try:
        reports = json.loads(path.read_text(encoding="utf-8"))
        return {report["op"]: _outcome(report["results"]) for report in reports}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise click.ClickException(
            f"--checked {path}: not a report of `check --json` ({type(error).__name__})"
        ) from None


def _outcome(results: list[Mapping[str, Any]]) -> str:
    outcomes = [result["outcome"] for result in results]
    counts = ((word, outcomes.count(word)) for word in ("passed", "failed", "expected failure"))
    return ", ".join(f"{count} {word}" for word, count in counts if count) or "none could be done"


def entry_of(op: str) -> Entry:
    operator = Operator(op, "list")
    kernels, rules = operator.kernels, operator.rules
    if operator.handle is None:
        kernels, rules = in_dispatcher(operator)
    where = short_place(place_of(operator) or "unknown")
    has_examples = torchop.get_rule("examples").has(op)
    return Entry(op, operator.schema.text, kernels, rules, where, has_examples)
