"""`python -m torchop accelerate`: what operators of other packages would gain from native calls."""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import click
import torch

import torchop
from torchop._accelerate import aligned
from torchop._errors import NothingToAccelerateWarning
from torchop._record import CallRecord, Recorded

_ROUNDS, _CALLS = 21, 50


@click.command()
@click.option("--report", "module", required=True, help="The module to import.")
@click.argument("patterns", nargs=-1)
def accelerate(module: str, patterns: tuple[str, ...]) -> None:
    """Imports a module, and prints which operators would be accelerated.

    PATTERNS name the operators; all that the import registers if there are none. Those that the
    module called while it was imported, or inside of torchop.record, are timed with arguments of
    the same kind: the cost of a call in microseconds, before and after.
    """
    wanted = patterns or ("*",)
    # A first call, or record, would import it, with operators of its own.
    importlib.import_module("torch._dynamo")
    known = {row.op for row in _rows(wanted)} if not patterns else set()
    try:
        with torchop.record(*wanted) as recorded:
            importlib.import_module(module)
    except ImportError as error:
        raise click.ClickException(f"{module} cannot be imported: {error}") from None
    except (TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    table = [("operator", "accelerated", "before", "after", "reason")]
    rows = [row for row in _rows(wanted) if row.op not in known]
    for row in rows:
        before, after = _costs(row.op, recorded)
        table.append((row.op, "yes" if row.accelerated else "no", before, after, row.reason))
    if rows:
        click.echo(aligned(table))
    else:
        click.echo(f"{module} registers no operator that matches {', '.join(wanted)}")


def _rows(patterns: tuple[str, ...]) -> tuple[torchop.AcceleratedOperator, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToAccelerateWarning)
        with torchop.accelerate(*patterns) as acceleration:
            return acceleration.operators


def _costs(op: str, recorded: Recorded) -> tuple[str, str]:
    """Microseconds for a call of the most frequent kind, before and after; empty if unknown."""
    example = _example(op, recorded)
    if example is None:
        return "", ""
    args, kwargs = example
    packet, _, overload = op.partition("::")[2].partition(".")
    function = getattr(
        getattr(getattr(torch.ops, op.partition("::")[0]), packet), overload or "default"
    )
    with torchop.accelerate(op):
        try:
            function(*args, **kwargs)
        except Exception as error:  # a tensor of ones may be no index, or no permutation
            return f"({type(error).__name__})", ""
        after, before = [], []
        for _ in range(_ROUNDS):
            after.append(_time(function, args, kwargs))
            with torchop.native.disabled():
                before.append(_time(function, args, kwargs))
    return f"{statistics.median(before):.2f}", f"{statistics.median(after):.2f}"


def _example(op: str, recorded: Recorded) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    calls: list[tuple[CallRecord, int]] = recorded.get(op, [])
    return calls[0][0].example() if calls else None


def _time(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        function(*args, **kwargs)
    return (time.perf_counter() - start) / _CALLS * 1e6
