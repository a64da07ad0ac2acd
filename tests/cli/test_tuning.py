"""`python -m torchop tuning`."""

from __future__ import annotations

import json

import pytest

from torchop._rules.providers import measurements, tuned
from torchop._rules.providers.measurements import Measured, Measurement


def measurement(low: int, *kernels: tuple[str, float], **changes: str) -> Measurement:
    found = tuple(Measured(name, {}, "0", us, (us, us)) for name, us in kernels)
    release = tuned.torch_release()
    made = Measurement("ns::f", "Abacus", release, "float32[*]", ((low, low),), found)
    return made._replace(**changes)


@pytest.fixture
def tables(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    measurements.write(one, [measurement(1, ("a", 1.0)), measurement(2, ("a", 2.0), ("b", 3.0))])
    old = measurement(3, ("b", 1.0), torch="1.0")
    measurements.write(two, [measurement(2, ("b", 1.5)), old])
    return one, two


def test_show(run, tables):
    outcome = run("tuning", "show", str(tables[0]))
    assert outcome.code == 0
    heading, _, fastest, _ = outcome.out.splitlines()
    assert heading.split()[:4] == ["operator", "call", "kernel", "us"]
    assert fastest.split()[:5] == ["ns::f", "float32[2]", "a", "2.00", "2.00"]
    shown = json.loads(run("tuning", "show", str(tables[0]), "--json").out)
    assert [m["call"] for m in shown] == ["float32[1]", "float32[2]"]


def test_merge_into_a_table_and_into_the_users(run, tables, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(tmp_path))
    outcome = run("tuning", "merge", *map(str, tables))
    assert "tuning.json has 3 measurements, of which 0 were there." in outcome.out
    found = measurements.read(tmp_path / "tuning.json")
    assert [m.kernels[0].provider for m in found if m.sizes == ((2, 2),)] == ["b"]
    run("tuning", "merge", str(tables[1]), "--into", str(tables[0]))
    assert measurements.read(tables[0]) == found


def test_merge_makes_the_users_cache(run, tables, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(tmp_path / "missing" / "cache"))
    assert "has 2 measurements" in run("tuning", "merge", str(tables[0])).out
    assert len(measurements.read(tmp_path / "missing" / "cache" / "tuning.json")) == 2


def test_a_table_that_cannot_be_written(run, tables, tmp_path, monkeypatch):
    target = tmp_path / "missing" / "table.json"
    outcome = run("tuning", "merge", str(tables[0]), "--into", str(target))
    assert outcome.code == 1
    assert "table.json cannot be written: No such file or directory" in outcome.err
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    outcome = run("tuning", "merge", str(tables[0]))
    assert outcome.code == 1
    assert "tuning.json cannot be written: " in outcome.err


def test_prune(run, tables):
    outcome = run("tuning", "prune", str(tables[1]))
    assert "has 1 measurements; 1 were removed." in outcome.out
    assert measurements.read(tables[1]) == [measurement(2, ("b", 1.5))]
    run("tuning", "prune", str(tables[1]), "--device", "Abacus")
    assert measurements.read(tables[1]) == []


def test_compare(run, tables):
    (row,) = json.loads(run("tuning", "compare", *map(str, tables), "--json").out)
    assert row == {
        "operator": "ns::f",
        "call": "float32[2]",
        "before": "a",
        "us before": 2.0,
        "after": "b",
        "us after": 1.5,
    }
    assert len(run("tuning", "compare", *map(str, tables)).out.splitlines()) == 2


def test_a_file_that_is_no_table(run, tmp_path):
    (tmp_path / "cut.json").write_text('{"format": 1')
    for command in ("show", "prune"):
        outcome = run("tuning", command, str(tmp_path / "cut.json"))
        assert outcome.code == 1
        assert "cut.json is no table of measurements" in outcome.err
    assert "cannot be read: No such file" in run("tuning", "show", str(tmp_path / "no.json")).err
