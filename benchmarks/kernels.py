"""Measure the operator in `examples/tuned_rms_norm.py`. It selects between two kernels.

One kernel is a C++ loop, and the other calls PyTorch's operators. Each row of the table is for a
tensor with a different number of rows of 1024 numbers. The variants are:

- cpp: the operator always runs the C++ loop.
- reference: the operator always runs the kernel that calls PyTorch's operators.
- torchop: the operator runs the kernel that `torchop.testing.tune` measured to be faster.
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
    # For the smallest and the largest tensor, the operator must run the faster kernel.
    limits=(
        Limit(TABLE, title(SIZES[0]), TUNED, 1.15, CPP),
        Limit(TABLE, title(SIZES[-1]), TUNED, 1.15, REFERENCE),
    ),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
