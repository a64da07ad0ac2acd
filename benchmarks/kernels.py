"""Measure the kernels of `examples/tuned_rms_norm.py`, and the operator that selects between them.

Each row has another number of rows of 1024 numbers. The variants are:

- cpp: the operator with the C++ loop first in the order of providers.
- reference: the operator with PyTorch's operators first.
- torchop: the operator with the measurements of `torchop.testing.tune`.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path

import torch

import harness
import torchop
from harness import Benchmark, Limit, Settings, Tables, Variant

TABLE = "calls"
CPP, REFERENCE, TUNED = "cpp", "reference", "torchop"
NAME, SIZES = "tuned_rms_norm::rms_norm", (1, 4, 16, 64, 256)
EXAMPLE = Path(__file__).parents[1] / "examples" / "tuned_rms_norm.py"


def title(size: int) -> str:
    return "1 row" if size == 1 else f"{size} rows"


def measure(settings: Settings) -> Tables:
    """Tune the operator, then measure it with each kernel."""
    op = runpy.run_path(str(EXAMPLE))["rms_norm"]
    with tempfile.TemporaryDirectory() as folder:
        torchop.testing.tune(op, budget=1.0, table=Path(folder, "tuned.json"))
    rows = {}
    for size in SIZES:
        arguments = torch.randn(size, 1024), torch.randn(1024)
        variants = {
            provider: Variant(
                op,
                arguments,
                context=lambda provider=provider: torchop.priority({NAME: [provider]}),
            )
            for provider in (CPP, REFERENCE)
        }
        with torch.no_grad():
            rows[title(size)] = harness.measure(
                {**variants, TUNED: Variant(op, arguments)}, settings["rounds"]
            )
    return {TABLE: rows}


BENCHMARK = Benchmark(
    name="kernels",
    units={TABLE: "us"},
    parts={"calls": measure},
    settings={"processes": 3, "rounds": 40},
    # The operator runs the faster kernel of the smallest and of the largest size.
    limits=(
        Limit(TABLE, title(SIZES[0]), TUNED, 1.15, CPP),
        Limit(TABLE, title(SIZES[-1]), TUNED, 1.15, REFERENCE),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
