"""Plot the results of `calls.py`: a line per row, a dot per route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # works without a display

import matplotlib.pyplot as plt

from _harness import Spread


def draw(file: Path, results: Mapping[str, Mapping[str, Spread]], routes: Sequence[str]) -> None:
    """Draw medians as dots and ranges as bars, over microseconds on a logarithmic scale."""
    rows = list(results)
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.6), layout="constrained")
    for route in routes:
        there = [index for index, row in enumerate(rows) if route in results[row]]
        spreads = [results[rows[index]][route] for index in there]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.lowest for spread in spreads]
        above = [spread.highest - spread.median for spread in spreads]
        axes.errorbar(medians, there, xerr=(below, above), fmt="o", markersize=5, label=route)
    axes.set_xscale("log")
    axes.set_xlabel("microseconds for one call")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(routes), fontsize="small", columnspacing=1)
    figure.savefig(file, dpi=150)
    plt.close(figure)
