"""A pytest plugin that accelerates operators while another package's tests run.

The environment variable REALWORLD_ACCELERATE is a pattern for `torchop.accelerate`. If it is empty,
no operator is accelerated. REALWORLD_REPORT is the path of the report to write.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from pathlib import Path

import pytest
import torch

import torchop

_outcomes: dict[str, str] = {}
_acceleration: torchop.Acceleration | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Accelerate matching operators, even if a test imports their package later."""
    global _acceleration
    torch.set_num_threads(1)
    pattern = os.environ["REALWORLD_ACCELERATE"]
    if pattern:
        _acceleration = torchop.accelerate(pattern)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Derive the random seeds from the name of the test. Each run then uses the same seeds."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test, i.e. the worst outcome of set-up, call and tear-down."""
    if report.failed or (report.skipped and _outcomes.get(report.nodeid) != "failed"):
        _outcomes[report.nodeid] = report.outcome
    _outcomes.setdefault(report.nodeid, "passed")


def pytest_sessionfinish() -> None:
    calls = {
        row.op: dict(torchop.native.counters(row.op))
        for row in (_acceleration.operators if _acceleration is not None else ())
        if row.accelerated
    }
    report = {"outcomes": _outcomes, "calls": {op: ways for op, ways in calls.items() if ways}}
    Path(os.environ["REALWORLD_REPORT"]).write_text(json.dumps(report))
