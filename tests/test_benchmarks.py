"""The benchmarks, run with tiny settings: that they work, not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROUTES = {"torchop", "custom_op", "define + impl"}


def run(
    name: str, tmp_path: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path / "results.json"
    process = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--json", str(file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    # What a benchmark found is its exit code; that it got through is the file, written last.
    assert file.exists(), process.stdout
    return process, json.loads(file.read_text())


def test_calls_measures_every_case_by_every_route(tmp_path: Path) -> None:
    process, results = run("calls.py", tmp_path, "--rounds", "1")
    assert process.returncode == 0, process.stdout
    assert results["environment"]["torch_threads"] == 1
    assert len(results["calls"]) == 8
    for case, timings in results["calls"].items():
        assert case in process.stdout
        assert set(timings) == {"plain call", "torchop handle", "torch.ops", *ROUTES - {"torchop"}}
        assert all(timing["median"] > 0 for timing in timings.values())


@pytest.fixture(scope="module")
def registration(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("registration")
    return run("registration.py", folder, "--operators", "6", "--repeats", "1")


def test_registration_measures_every_route(registration: Any) -> None:
    _, results = registration
    assert results["import"]["milliseconds"] > 0
    assert set(results["first"]) == ROUTES
    for routes in results["many"].values():
        assert set(routes) == ROUTES
        assert all(numbers["microseconds"] > 0 for numbers in routes.values())


def test_registration_exits_with_its_bars(registration: Any) -> None:
    process, results = registration
    bars = results["bars"]
    assert len(bars) == 4
    assert process.returncode == (0 if all(bar["passed"] for bar in bars) else 1)
    assert process.stdout.count("pass  ") == sum(bar["passed"] for bar in bars)
    assert process.stdout.count("FAIL  ") == sum(not bar["passed"] for bar in bars)


def test_eager_use_never_imports_dynamo(registration: Any) -> None:
    _, results = registration
    dynamo = {
        route: sum(step["dynamo_modules"] for step in steps.values())
        for route, steps in results["first"].items()
    }
    assert dynamo["torchop"] == 0
    assert dynamo["custom_op"] > 0, "the count finds torch._dynamo where it is imported"
