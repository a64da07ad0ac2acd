"""A pytest plugin that accelerates operators during another package's tests, and writes a report.

It reads two environment variables: REALWORLD_REPORT is the file to write, and REALWORLD_ACCELERATE
is a pattern for `torchop.accelerate`, or empty.
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
    """Accelerate matching operators, including those of packages that tests import later."""
    global _acceleration
    torch.set_num_threads(1)
    pattern = os.environ["REALWORLD_ACCELERATE"]
    if pattern:
        _acceleration = torchop.accelerate(pattern)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the random seeds from the name of a test."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the worst outcome of the set-up, call and tear-down of a test."""
    if report.failed or (report.skipped and _outcomes.get(report.nodeid) != "failed"):
        _outcomes[report.nodeid] = report.outcome
    _outcomes.setdefault(report.nodeid, "passed")


def pytest_sessionfinish() -> None:
    """Write the outcome of each test, and the number of calls to each operator by path."""
    calls = {
        row.op: dict(torchop.native.counters(row.op))
        for row in (_acceleration.operators if _acceleration is not None else ())
        if row.accelerated
    }
    report = {"outcomes": _outcomes, "calls": {op: ways for op, ways in calls.items() if ways}}
    Path(os.environ["REALWORLD_REPORT"]).write_text(json.dumps(report))
