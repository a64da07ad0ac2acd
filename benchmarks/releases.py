"""Compare results of `calls.py` for several releases of PyTorch.

    python benchmarks/releases.py FILE FILE...

Each file is the output of `calls.py --json FILE`. Prints a Markdown table with a row per kind of
call, and columns for the plain function, torchop's handle and `torch.library.custom_op`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROUTES = {"plain call": "function", "torchop handle": "torchop", "custom_op": "`custom_op`"}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table of several runs, with a dash for missing rows and routes."""
    releases = [run["environment"]["torch"].partition("+")[0] for run in runs]
    # The row "not ours" has no operator of torchop.
    rows = dict.fromkeys(
        row for run in runs for row, routes in run["calls"].items() if "torchop handle" in routes
    )
    columns = [f"{release}: {name}" for release in releases for name in ROUTES.values()]
    lines = [_line("microseconds for one call", *columns), _line(*["---"] * (len(columns) + 1))]
    for row in rows:
        cells = [_cell(run["calls"].get(row, {}), route) for run in runs for route in ROUTES]
        lines.append(_line(row, *cells))
    return "\n".join(lines)


def _cell(routes: dict[str, dict[str, float]], route: str) -> str:
    return f"{routes[route]['median']:.1f}" if route in routes else "-"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="+", help="output of `calls.py --json`")
    print(table([json.loads(file.read_text()) for file in parser.parse_args().file]))


if __name__ == "__main__":
    main()
