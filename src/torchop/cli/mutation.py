"""`python -m torchop check --mutate`: which changes of operators' functions no check notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from torchop import MissingRuleError
from torchop.cli.child_process import first_line
from torchop.testing import MutationReport
from torchop.testing._check.report import write_json
from torchop.testing._mutate.api import run


def mutate_operators(
    operators: Sequence[str],
    examples_of: Callable[[str], Sequence[Any]],
    reference_of: Callable[[str], Any],
    budget: float | None,
    timeout: float,
    json_path: Path | None,
    **options: Any,
) -> bool:
    """Prints a report for each operator; returns whether there are some, and nothing survived.

    Args:
        examples_of: the examples of an operator; empty for those that are registered.
        reference_of: its reference, or None.
        options: more arguments of `mutate`.
    """
    reports: list[MutationReport] = []
    columns = (BarColumn(), TextColumn("{task.description}", markup=False))
    # Drawn when it moves, not by a thread, which a fork would not have.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    for op in operators:
        task = bar.add_task(op)

        def progress(done: int, total: int, task: Any = task, op: str = op) -> None:
            bar.update(task, completed=done, total=total, description=f"{op} {done}/{total}")
            bar.refresh()

        try:
            reference = reference_of(op)
            with bar:
                report = run(
                    op,
                    lambda op=op: examples_of(op),  # type: ignore[misc]  # it has the loop's
                    {"reference": reference, **options},
                    budget,
                    progress,
                    timeout,
                )
        except MissingRuleError:
            click.echo(f"not changed: {op} has no examples; see --examples")
        except (RuntimeError, ValueError, TypeError) as error:
            click.echo(f"not changed: {first_line(error)}")
        else:
            reports.append(report)
            click.echo(str(report))
        bar.remove_task(task)
    if json_path is not None:
        write_json([report.to_dict() for report in reports], json_path)
    return bool(reports) and not any(report.survivors for report in reports)
