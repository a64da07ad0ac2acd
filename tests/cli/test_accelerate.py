from __future__ import annotations

import importlib
import json
import os

import pytest
import torch

import torchop
from tests._support.common import needs_native
from torchop.testing import CallRecord, TensorRecord

pytest.importorskip("click")
# Import the module by its name, because the attribute `torchop.cli.accelerate` is the command.
report = importlib.import_module("torchop.cli.accelerate")
from torchop.cli.measure import Cost, Measurement  # noqa: E402  # needs click

pytestmark = needs_native

X = TensorRecord(torch.float32, (3,), "cpu", False)


@pytest.fixture
def save(tmp_path, namespace):
    """Return a function that saves a recording, given each operator's call and its count."""

    def save(file="calls.json", **calls):
        recorded = torchop.record("*")
        for name, (call, count) in calls.items():
            recorded._add(f"{namespace}::{name}", call, count)
        recorded.save(tmp_path / file)
        return str(tmp_path / file)

    return save


def test_calls_of_the_import_are_measured(run, write, namespace):
    from .conftest import PACKAGE

    package = write("package", f"{PACKAGE}\ncalled(torch.ones(3), 5)\n")
    outcome = run("accelerate", "--report", package, f"{namespace}::*")
    assert outcome.code == 0
    accelerated, calls, native, before, after = outcome.row(f"{namespace}::called")
    assert (accelerated, calls, native) == ("yes", "1", "1")
    assert 0 < float(after) < float(before)
    assert outcome.err == ""
    assert outcome.row(f"{namespace}::other") == ["yes"]


def test_recorded_calls_are_measured(run, package, save, namespace):
    first = save(called=(CallRecord((X, 5), {}), 1000))
    second = save("second.json", called=(CallRecord((X, 3), {}), 500))
    arguments = ("--report", package, "--recorded", first, "--recorded", second)
    outcome = run("accelerate", *arguments, "--run-recorded")
    assert outcome.err == (
        "torchop: to time the recorded operators, these calls are made:\n"
        f"  {namespace}::called(float32[3] on cpu, 5)\n"
        f"  {namespace}::called(float32[3] on cpu, 3)\n"
    )
    accelerated, calls, native, before, after = outcome.row(f"{namespace}::called")
    assert (accelerated, calls, native) == ("yes", "1500", "1500")
    assert outcome.row(f"{namespace}::other") == ["yes"]
    saved = outcome.out.splitlines()[-1]
    assert saved.startswith("In the recorded calls, this saves ")
    number, unit = saved.removesuffix(".").split()[-2:]
    assert unit == "ms"
    assert float(number) == pytest.approx(1.5 * (float(before) - float(after)), abs=0.03)


def test_recorded_calls_are_not_repeated_without_the_option(run, write, save, namespace, tmp_path):
    trusting = write(
        "trusting",
        """
import torch

@torch.library.custom_op("NAMESPACE::store", mutates_args=())
def store(x: torch.Tensor, path: str) -> torch.Tensor:
    open(path, "w").close()
    return x.clone()

store(torch.ones(2), "/dev/null")
""",
    )
    path = str(tmp_path / "written")
    file = save(store=(CallRecord((X, path), {"k": ["\x1b[2J" + "x" * 999]}), 6))
    outcome = run("accelerate", "--report", trusting, "--recorded", file)
    assert not os.path.exists(path)
    assert outcome.err.startswith(
        "torchop: the recorded calls are not timed. If you trust the files, --run-recorded "
        f"makes these calls:\n  {namespace}::store(float32[3] on cpu, {path!r}, "
    )
    assert outcome.err.isascii()
    assert "\x1b" not in outcome.err
    assert len(outcome.err) < 500
    # The count is 7, because the module called the operator once when it was imported.
    assert outcome.row(f"{namespace}::store")[:3] == ["yes", "7", "7"]
    assert "this saves" in outcome.out
    file = save(store=(CallRecord((X, path), {}), 6))
    run("accelerate", "--report", trusting, "--recorded", file, "--run-recorded")
    assert os.path.exists(path)


def test_recorded_operators_registered_before_are_included(run, package, save, namespace):
    torch.library.define(f"{namespace}::known", "(Tensor x) -> Tensor")
    torch.library.impl(f"{namespace}::known", "cpu", lambda x: x * 2)
    file = save(known=(CallRecord((X,), {}), 7), gone=(CallRecord((X,), {}), 3))
    outcome = run("accelerate", "--report", package, "--recorded", file)
    assert outcome.row(f"{namespace}::known")[:2] == ["yes", "7"]
    assert " ".join(outcome.row(f"{namespace}::gone")) == (
        "no 3 it is not registered here; import the module that registers it, with --report"
    )
    chosen = run("accelerate", "--report", package, "--recorded", file, f"{namespace}::known")
    assert f"{namespace}::gone" not in chosen.out
    assert f"{namespace}::other" not in chosen.out


def test_a_file_that_is_no_recording_is_refused(run, package, tmp_path):
    path = tmp_path / "calls.json"
    path.write_text(json.dumps({"torchop recording": 1}))
    outcome = run("accelerate", "--report", package, "--recorded", str(path))
    assert outcome.code == 1
    assert f"{path}: the file: expected the keys calls, torchop recording, got" in outcome.err
    missing = run("accelerate", "--report", package, "--recorded", str(tmp_path / "none"))
    assert missing.code == 1
    assert "No such file" in missing.err


def test_a_module_without_operators_is_reported(run):
    outcome = run("accelerate", "--report", "json", "nobody::*")
    assert outcome.out == "json registers no operator that matches nobody::*\n"


def test_invalid_pattern_is_rejected(run):
    outcome = run("accelerate", "--report", "json", "nobody")
    assert outcome.code == 1
    assert "no operator name can match that" in outcome.err


# --------------------------------------------------------------------------------------------------
# The table that the report prints


@pytest.fixture
def lines(monkeypatch):
    """Return a function that returns the report's table for an operator that was called 8 times."""

    def lines(measurement):
        monkeypatch.setattr(report, "measure", lambda ops: dict.fromkeys(ops, measurement))
        recorded = torchop.record("*")
        recorded._add("a::b", CallRecord((X,), {}), 8)
        row = torchop.AcceleratedOperator("a::b", True, "")
        return report.table([row], recorded, recorded).splitlines()

    return lines


def test_operators_that_cannot_be_accelerated_are_not_measured():
    recorded = torchop.record("*")
    recorded._add("aten::sin", CallRecord((X,), {}), 4)
    rows = report.rows_of_recorded(recorded, ("aten::*",))
    lines = report.table(rows, recorded, recorded).splitlines()
    assert [line.split() for line in lines] == [
        ["operator", "accelerated", "calls", "native", "before", "after", "reason"],
        ["aten::sin", "no", "4", "it", "was", "defined", "in", "C++"],
    ]


def test_savings_of_native_calls_are_added_up(lines):
    _, row, _, saved = lines(Measurement(0.75, Cost(3.0, 1.0, 0.5)))
    assert row.split() == ["a::b", "yes", "8", "6", "3.00", "1.00"]
    assert saved == "In the recorded calls, this saves 12.00 us."


def test_a_difference_within_the_noise_is_marked_and_saves_nothing(lines):
    _, row, _, saved = lines(Measurement(1.0, Cost(3.0, 2.5, 0.5)))
    assert row.split()[2:6] == ["8", "8", "3.00", "2.50"]
    assert row.endswith("before and after differ by no more than the noise")
    assert saved == "In the recorded calls, this saves 0.00 us."


def test_the_table_says_why_calls_are_not_measured(lines):
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
