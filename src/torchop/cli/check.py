"""`python -m torchop check`: runs the checks of `torchop.testing.check` on operators."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torchop.cli.checking_process import NotCheckedError, Request, check_operator, prepare
from torchop.cli.selection import Selection, file_to_write, selecting
from torchop.testing import CheckReport
from torchop.testing._check.report import write_html


def _seconds(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value:g} is not a number of seconds above 0")
    return value


@click.command()
@selecting
@click.option(
    "-k",
    "only",
    multiple=True,
    metavar="CHECK",
    help="Checks to run: a name, a family or a pattern.",
)
@click.option("--seed", default=0, show_default=True, help="The seed of random inputs.")
@click.option("--examples", metavar="MODULE:NAME", help="A dict from operators to their examples.")
@click.option(
    "--expected", metavar="MODULE:NAME", help="A dict from checks that may fail to reasons."
)
@click.option(
    "--budget", type=float, callback=_seconds, help="Seconds for all checks of one operator."
)
@click.option(
    "--timeout",
    default=300.0,
    callback=_seconds,
    show_default=True,
    help="Seconds that one check may take.",
)
@file_to_write("--report", help="Write a page of HTML.")
@file_to_write("--json", "json_path", help="Write JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show checks that did not fail, too.")
def check(
    selection: Selection,
    only: tuple[str, ...],
    seed: int,
    examples: str | None,
    expected: str | None,
    budget: float | None,
    timeout: float,
    report: Path | None,
    json_path: Path | None,
    verbose: bool,
) -> None:
    """Checks operators on inputs that their authors did not try.

    The command runs the checks of torchop.testing.check. They start from the examples that are
    registered with the operators, or from those of --examples. Each operator runs in a process of
    its own. If it crashes or hangs, that check has failed, and the other checks go on.

    --expected lists known failures, as the argument of pytest.mark.torchop does: by check, or by
    operator and then by check. A known failure does not count as a failure. A check that is listed
    and passes does.

    The exit code is 0 if no check failed, and 1 if one did or no operator has examples.
    """
    if report is not None:
        _find_jinja()
    request = Request(selection.modules, examples, expected, only or None, seed, timeout, budget)
    reports, unchecked = _check(selection.operators, request)
    for each in reports:
        click.echo(str(each) if verbose else _in_short(each))
    for problem in unchecked:
        click.echo(f"not checked: {problem}")
    failed = sum(not each.ok for each in reports)
    click.echo(
        f"\noperators: {len(reports)} checked, {failed} with failures, {len(unchecked)} not checked"
    )
    if report is not None:
        write_html(reports, report)
    if json_path is not None:
        values = [each.to_dict() for each in reports]
        json_path.write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf-8")
    sys.exit(0 if reports and not failed else 1)


def _find_jinja() -> None:
    try:
        import jinja2  # noqa: F401  # before the checks run, which take minutes
    except ModuleNotFoundError:
        raise click.ClickException("--report needs jinja2: pip install 'torchop[cli]'") from None


def _check(operators: Sequence[str], request: Request) -> tuple[list[CheckReport], list[str]]:
    """The reports, and why some operators have none."""
    prepare(request)
    reports: list[CheckReport] = []
    unchecked = []
    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(operators))
        for number, op in enumerate(operators):

            def progress(
                done: int, total: int, name: str, op: str = op, before: int = number
            ) -> None:
                bar.update(task, completed=before + done / total, description=f"{op} {name}")

            bar.update(task, completed=number, description=op)
            try:
                reports.append(check_operator(op, request, progress))
            except NotCheckedError as error:
                unchecked.append(str(error))
    return reports, unchecked


def _in_short(report: CheckReport) -> str:
    lines = [report.summary()]
    for failure in report.failures:
        lines += ["", f"FAILED {failure.check}: {failure.message}", ""]
        lines += [f"    {line}".rstrip() for line in failure.program.splitlines()]
    return "\n".join(lines)
