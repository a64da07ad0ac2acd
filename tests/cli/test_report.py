"""The table of what operators would gain."""

from __future__ import annotations

import pytest
import torch

import torchop
from tests.support import needs_native
from torchop import CallRecord, TensorRecord

pytest.importorskip("click")

from torchop.cli import report  # it needs click
from torchop.cli.measure import Cost, Measurement

pytestmark = needs_native

X = TensorRecord(torch.float32, (3,), "cpu", False)


@pytest.fixture
def lines(monkeypatch):
    """The lines of the table of an operator that was called 8 times, and measured like this."""

    def lines(measurement):
        monkeypatch.setattr(report, "measure", lambda ops: dict.fromkeys(ops, measurement))
        recorded = torchop.record("*")
        recorded._add("a::b", CallRecord((X,), {}), 8)
        row = torchop.AcceleratedOperator("a::b", True, "")
        return report.table([row], recorded, recorded).splitlines()

    return lines


def test_what_gains_nothing_is_not_measured():
    recorded = torchop.record("*")
    recorded._add("aten::sin", CallRecord((X,), {}), 4)
    rows = report.rows_of_recorded(recorded, ("aten::*",))
    lines = report.table(rows, recorded, recorded).splitlines()
    assert [line.split() for line in lines] == [
        ["operator", "accelerated", "calls", "native", "before", "after", "reason"],
        ["aten::sin", "no", "4", "it", "was", "defined", "in", "C++"],
    ]


def test_what_native_calls_save_is_added_up(lines):
    _, row, _, saved = lines(Measurement(0.75, Cost(3.0, 1.0, 0.5)))
    assert row.split() == ["a::b", "yes", "8", "6", "3.00", "1.00"]
    assert saved == "In the calls that were recorded, this saves 12.00 us."


def test_a_difference_within_the_noise_is_marked_and_saves_nothing(lines):
    _, row, _, saved = lines(Measurement(1.0, Cost(3.0, 2.5, 0.5)))
    assert row.split()[2:6] == ["8", "8", "3.00", "2.50"]
    assert row.endswith("before and after differ by no more than the noise")
    assert saved == "In the calls that were recorded, this saves 0.00 us."


def test_what_is_not_measured_says_why(lines):
    _, row = lines(Measurement(0.5, None, "it is too large"))
    assert row.split()[:4] == ["a::b", "yes", "8", "4"]
    assert row.endswith("  not measured: it is too large")


def test_calls_that_must_not_be_made_again_are_only_counted(monkeypatch):
    monkeypatch.setattr(report, "measure", lambda ops: {} if not ops else 1 / 0)
    recorded = torchop.record("*")
    recorded._add("a::b", CallRecord((X,), {}), 8)
    row = torchop.AcceleratedOperator("a::b", True, "")
    _, line = report.table([row], recorded, torchop.record("*")).splitlines()
    assert line.split() == ["a::b", "yes", "8"]


@pytest.mark.parametrize(
    ("microseconds", "text"), [(3.456, "3.46 us"), (3456, "3.46 ms"), (3.456e6, "3.46 s")]
)
def test_durations_have_a_fitting_unit(microseconds, text):
    assert report._duration(microseconds) == text
