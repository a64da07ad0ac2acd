"""A plugin of pytest that runs somebody else's tests, accelerated if asked, and writes what it saw.

It reads two variables of the environment: REALWORLD_REPORT names the file to write, and
REALWORLD_ACCELERATE is a pattern for `torchop.accelerate`, empty for none.
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
    """Before any test is imported: operators of a package that comes later are accelerated too."""
    global _acceleration
    torch.set_num_threads(1)
    pattern = os.environ["REALWORLD_ACCELERATE"]
    if pattern:
        _acceleration = torchop.accelerate(pattern)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives a test the same random numbers in every run."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the worst of set-up, call and tear-down; a part that passed says nothing more."""
    if report.failed or (report.skipped and _outcomes.get(report.nodeid) != "failed"):
        _outcomes[report.nodeid] = report.outcome
    _outcomes.setdefault(report.nodeid, "passed")


def pytest_sessionfinish() -> None:
    """Writes the outcome of each test, and the calls of each operator by the way they took."""
    calls = {
        row.op: dict(torchop.native.counters(row.op))
        for row in (_acceleration.operators if _acceleration is not None else ())
        if row.accelerated
    }
    report = {"outcomes": _outcomes, "calls": {op: ways for op, ways in calls.items() if ways}}
    Path(os.environ["REALWORLD_REPORT"]).write_text(json.dumps(report))
