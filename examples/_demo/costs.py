"""The price of a call, measured where the demo runs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.table import Table

# The cases, the routes and the clock are the benchmark's own, so that the demo cannot differ.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import calls  # found through the line above


def measure_costs(rounds: int) -> tuple[Table, str]:
    """Times small operators by every route; returns a table and what it says in a sentence."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = (calls.FOURTEEN, calls.FOURTEEN_GRAD, calls.ONE, calls.ONE_GRAD)
        results = {case.title: calls.compare(case, rounds) for case in cases}
    finally:
        torch.set_num_threads(threads)
    medians = [{route: t.median for route, t in timings.items()} for timings in results.values()]
    over_plain = [row[calls.HANDLE] / row[calls.PLAIN] for row in medians]
    over_stock = [row[calls.HANDLE] / row[calls.CUSTOM_OP] for row in medians]
    summary = (
        f"A call of a torchop handle costs {min(over_plain):.1f} to {max(over_plain):.1f} times "
        f"the plain call, and {min(over_stock):.2f} to {max(over_stock):.2f} times "
        "torch.library.custom_op: both go through PyTorch's dispatcher."
    )
    return calls.results_table("What a call costs (medians; 1 thread)", results), summary
