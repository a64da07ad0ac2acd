"""Reports of `check` as text and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

import torchop
from torchop.testing import CheckReport, Result

RESULTS = (
    Result("memory.given", "passed", question="Is it?", seconds=0.5, cases=3),
    Result("memory.gaps", "failed", "1 is not 2", "f(x)", cases=1),
    Result("dtypes.accepted", "passed", details={"dtypes": {"float32": "-> float32"}}),
    Result("subsystems.vmap", "cannot be done", "no vmap rule"),
    Result("subsystems.fake", "expected failure", "strides (known)", "g(x)"),
    Result("subsystems.inductor", "not run", "the budget of 3 s was spent"),
)


def made(op: str = "mylib::f", results: tuple[Result, ...] = RESULTS) -> CheckReport:
    return CheckReport(op, f"{op}(Tensor x) -> Tensor", results, 7, 2.5)


def test_text_lists_failures_and_skipped_checks() -> None:
    text = str(made())
    assert text.splitlines()[0] == (
        "mylib::f: 2 passed, 1 failed, 1 expected failure, 1 cannot be done, 1 not run "
        "(2.5 s, seed 7)"
    )
    for part in (
        "subsystems.vmap: cannot be done because: no vmap rule",
        "subsystems.fake: expected to fail: strides (known)",
        "subsystems.inductor: not run: the budget of 3 s was spent",
        "dtypes.accepted: dtypes: float32 -> float32",
        "FAILED memory.gaps: 1 is not 2",
        "\n    f(x)",
    ):
        assert part in text


def test_checks_with_the_same_reason_share_a_line() -> None:
    undone = [Result(f"subsystems.{name}", "cannot be done", "no formula") for name in "abc"]
    lines = str(made(results=(undone[0], RESULTS[0], *undone[1:]))).splitlines()
    together = "  subsystems.a, subsystems.b, subsystems.c: cannot be done because: no formula"
    assert lines.count(together) == 1
    assert sum("no formula" in line for line in lines) == 1


def test_failures_with_the_same_cause_are_listed_under_the_first() -> None:
    cause = "IndexError: out of range"
    report = made(
        results=(
            Result("memory.gaps", "failed", "gaps", "first(x)", cause=cause, group="layout"),
            Result("memory.empty", "failed", "of 0", "other(x)", group="size"),
            Result("memory.single", "failed", "of 1", "second(x)", cause=cause, group="size"),
        )
    )
    text = report.in_short()
    assert [each.failure.check for each in report.findings] == ["memory.gaps", "memory.empty"]
    assert "FAILED memory.gaps: gaps\n  also fails: memory.single\n" in text
    assert "first(x)" in text
    assert "other(x)" in text
    assert "second(x)" not in text
    assert [failure.program for failure in report.failures][-1] == "second(x)"
    assert "also fails" in str(report)
    assert "also fails" not in made().in_short()


def test_expected_failures_are_not_failures() -> None:
    report = made()
    assert not report.ok
    assert report.failures == (RESULTS[1],)
    assert made(results=RESULTS[:1] + RESULTS[2:5]).ok


def test_report_survives_a_round_trip_through_json(tmp_path: Path) -> None:
    report = made()
    report.to_json(tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["ok"] is False
    assert values["results"][1]["check"] == "memory.gaps"
    again = CheckReport.from_dict(values)
    assert again == report
    assert str(again) == str(report)
    with pytest.raises(ValueError, match="not a report"):
        CheckReport.from_dict({**values, "format": 99})


def test_environment_names_versions_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    # A package that is on PYTHONPATH, but not installed, has no metadata.
    monkeypatch.setattr(importlib.metadata, "version", version)
    environment = made().environment
    assert environment["torchop"] == torchop.__version__
    assert set(environment) == {"torchop", "torch", "python", "platform", "devices"}
    assert environment["devices"].startswith("CPU (")
