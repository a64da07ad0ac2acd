"""`python -m torchop check --mutate`: which changes of operators' functions no check notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

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
    for op in operators:
        try:
            reference = reference_of(op)
            report = run(
                op,
                lambda op=op: examples_of(op),  # type: ignore[misc]  # it has the loop's
                {"reference": reference, **options},
                budget,
                timeout,
            )
        except MissingRuleError:
            click.echo(f"not changed: {op} has no examples; see --examples")
        except (RuntimeError, ValueError, TypeError) as error:
            click.echo(f"not changed: {first_line(error)}")
        else:
            reports.append(report)
            click.echo(str(report))
    if json_path is not None:
        write_json([report.to_dict() for report in reports], json_path)
    return bool(reports) and not any(report.survivors for report in reports)
