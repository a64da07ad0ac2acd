"""Measure the time of calls on the machine that runs the demo."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.table import Table

import torchop

# Import the benchmark `calls.py`, because the demo should measure in the same way.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _cases
import calls
import harness

ROUTES = (calls.PLAIN, calls.HANDLE, calls.CUSTOM_OP)


def measure_costs(rounds: int) -> tuple[Table, str]:
    """Measure how long calls to small operators take. Return a table and a summary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = (_cases.FOURTEEN, _cases.GRAD, _cases.ONE, _cases.GRAD_1)
        rows = {case.title: _measure(case, rounds) for case in cases}
    finally:
        torch.set_num_threads(threads)
    title = f"Microseconds per call (medians; torch {torch.__version__})"
    table = harness.table(title, "", *ROUTES)
    for title, medians in rows.items():
        plain = medians[calls.PLAIN]
        table.add_row(
            title, *(f"{median:.2f} ({median / plain:.1f}x)" for median in medians.values())
        )
    over_plain = [row[calls.HANDLE] / row[calls.PLAIN] for row in rows.values()]
    under_stock = [row[calls.CUSTOM_OP] / row[calls.HANDLE] for row in rows.values()]
    ready = torchop.native.status().state == "ready"
    way = (
        "Its calls are native."
        if ready
        else "Native calls are not available, so its calls go through the dispatcher."
    )
    return table, (
        f"A call of a torchop handle takes {min(over_plain):.1f} to {max(over_plain):.1f} times as "
        f"long as the plain call, and is {min(under_stock):.1f} to {max(under_stock):.1f} times "
        f"faster than torch.library.custom_op. {way}"
    )


def _measure(case: _cases.Case, rounds: int) -> dict[str, float]:
    variants = calls.case_row(case, cpp=False).variants
    return harness.measure({route: variants[route] for route in ROUTES}, rounds)
