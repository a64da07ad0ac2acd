"""The benchmarks, run with tiny settings: that they work, not how fast anything is."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._support.forking import run_compiling, run_forked, run_script

pytestmark = pytest.mark.project

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROUTES = {"torchop", "custom_op", "define + impl"}
# The rows of calls, and the bars, that there are only where PyTorch has tags for them.
FORMS = sum(hasattr(torch.Tag, tag) for tag in ("inplace", "out"))


def run(
    name: str, tmp_path: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path / "results.json"
    process = run_script(BENCHMARKS / name, "--json", str(file), *arguments)
    # What a benchmark found is its exit code; that it got through is the file, written last.
    assert file.exists(), process.stdout + process.stderr
    return process, json.loads(file.read_text())


def check_bars(
    process: subprocess.CompletedProcess[str], bars: list[dict[str, Any]], count: int
) -> None:
    assert len(bars) == count
    assert process.returncode == (0 if all(bar["passed"] for bar in bars) else 1)
    assert process.stdout.count("pass  ") == sum(bar["passed"] for bar in bars)
    assert process.stdout.count("FAIL  ") == sum(not bar["passed"] for bar in bars)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # The process that it starts would import PyTorch and its compilers for a number of each call.
    folder = tmp_path_factory.mktemp("calls")
    file, plot = folder / "results.json", folder / "calls.png"
    program = f"""
        import contextlib, io, runpy, sys, types
        sys.path.insert(0, {str(BENCHMARKS)!r})
        import calls
        def run(command, **options):
            sys.argv[:] = command[1:]
            with contextlib.redirect_stdout(io.StringIO()) as output:
                runpy.run_path(command[1], run_name="__main__")
            return types.SimpleNamespace(stdout=output.getvalue())
        calls.subprocess = types.SimpleNamespace(run=run, PIPE=None)
        sys.argv[1:] = "--processes 1 --rounds 1 --plot {plot} --json {file}".split()
        sys.exit(calls.main())
    """
    process = run_compiling(program)
    assert file.exists(), process.stdout + process.stderr
    return process, json.loads(file.read_text()), plot


def test_calls_measures_every_case_by_its_routes(calls: Any) -> None:
    process, results, _ = calls
    usual = {"plain call", "torchop handle", "torch.ops", "custom_op", "define + impl"}
    rows = results["calls"]
    assert results["environment"]["torch_threads"] == 1
    assert len(rows) == 20 + FORMS
    for row, routes in rows.items():
        assert row in process.stdout
        assert set(routes) - {"C++ op"} == (
            {"torchop handle", "custom_op"}
            if row == "Inductor graph"
            else {"plain call", "torch.ops"}
            if row == "not ours"
            else {"plain call", "torchop handle", "torch.ops"}
            if row.startswith("dataclass")
            else usual | {"autograd.Function"}
            if row.startswith(("grad", "forward"))
            else usual
        )
        for spread in routes.values():
            assert 0 < spread["lowest"] == spread["median"] == spread["highest"]
    if "Without the C++ operator" not in process.stdout:
        assert sum("C++ op" in routes for routes in rows.values()) == 9


def test_calls_exits_with_its_bars(calls: Any) -> None:
    process, results, _ = calls
    without_cpp = "Without the C++ operator" in process.stdout
    check_bars(process, results["bars"], 20 + FORMS + 3 * (not without_cpp))


def test_calls_draws_a_picture(calls: Any) -> None:
    _, _, plot = calls
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_calls_fails_when_the_dispatcher_was_measured(tmp_path: Path) -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(BENCHMARKS)!r})
        import _calls_process, _cases, _routes, torchop
        with torchop.native.disabled():
            _calls_process.time_row(_routes.row(_cases.ONE, cpp=False), 1)
    """
    process = run_forked(program, timeout=300)
    assert process.returncode == 1
    assert re.search(
        r"RuntimeError: 1 tensor: torchop counted {'switched_off': (\d+)} calls, "
        r"but the row measures {'native': \1}",
        process.stderr,
    )


@pytest.fixture(scope="module")
def registration(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # Of its processes, the one that times an import. The others would import PyTorch for a number.
    file = tmp_path_factory.mktemp("registration") / "results.json"
    program = f"""
        import json, os, sys
        sys.path.insert(0, {str(BENCHMARKS)!r})
        import registration, _fresh_process
        start = registration._fresh_process
        def process(what, *arguments):
            if what == "import":
                return start(what)
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    sys.stdout = open(writer, "w")
                    _fresh_process.main(what, *arguments)
                    sys.stdout.close()
                finally:
                    os._exit(0)
            os.close(writer)
            with open(reader) as results:
                result = json.load(results)
            os.waitpid(child, 0)
            return result
        registration._fresh_process = process
        sys.argv[1:] = "--operators 6 --repeats 1 --json {file}".split()
        sys.exit(registration.main())
    """
    process = run_forked(program, timeout=300)
    assert file.exists(), process.stdout + process.stderr
    return process, json.loads(file.read_text())


def test_registration_measures_every_route(registration: Any) -> None:
    _, results = registration
    assert results["import"]["milliseconds"] > 0
    assert set(results["first"]) == ROUTES
    for routes in results["many"].values():
        assert set(routes) == ROUTES
        assert all(numbers["microseconds"] > 0 for numbers in routes.values())


def test_registration_exits_with_its_bars(registration: Any) -> None:
    process, results = registration
    check_bars(process, results["bars"], 7)


def test_eager_use_never_imports_dynamo(registration: Any) -> None:
    _, results = registration
    dynamo = {
        route: sum(step["dynamo_modules"] for step in steps.values())
        for route, steps in results["first"].items()
    }
    assert dynamo["torchop"] == 0
    assert dynamo["custom_op"] > 0, "the count finds torch._dynamo where it is imported"


def test_training_measures_what_each_way_keeps(tmp_path: Path) -> None:
    process, results = run("training.py", tmp_path, "--rounds", "1", "--side", "32")
    check_bars(process, results["bars"], 6)
    assert all(bar["passed"] for bar in results["bars"]), "memory does not depend on the machine"
    assert set(results["training"]) == {"elementwise", "attention", "with_dropout"}
    row = results["training"]["elementwise"]
    assert row["plain call"]["kilobytes"] == 10 * row["checkpoint"]["kilobytes"]
    assert all(measured["microseconds"] > 0 for measured in row.values())


def test_residuals_measures_each_way(tmp_path: Path) -> None:
    process, results = run("residuals.py", tmp_path, "--rounds", "1")
    check_bars(process, results["bars"], 3)
    assert all(median > 0 for median in results["calls"].values())


def test_compiling_measures_the_first_compile_and_calls(tmp_path: Path) -> None:
    # Of all processes, one: each would import PyTorch and its compilers for a number.
    file = tmp_path / "results.json"
    program = f"""
        import sys
        sys.path.insert(0, {str(BENCHMARKS)!r})
        import compiling, _compiling_process
        def process(what, *arguments):
            more = ["eager"] if what == "calls" else []
            return _compiling_process.measure(what, *arguments, *more)
        compiling._process = process
        sys.argv[1:] = "--operators 2 --repeats 1 --rounds 1 --json {file}".split()
        sys.exit(compiling.main())
    """
    process = run_compiling(program)
    results = json.loads(file.read_text())
    check_bars(process, results["bars"], 10)
    peak = results["chains"][0]["peak"]
    families = {"out_op", "out_op, elementwise"}
    assert set(peak) == {*families, "torchop", "custom_op", "torch.Tag.out"}
    assert peak["out_op, elementwise"] < peak["out_op"]  # which is the point of it
    for row in (*results["first"].values(), *results["calls"][0].values()):
        assert set(row) - {"torchop, dataclass"} == {"torchop", "custom_op"}
    for row in results["calls"][0].values():
        assert all(microseconds > 0 for microseconds in row.values())


def test_sharding_measures_calls_and_decisions(tmp_path: Path) -> None:
    process, results = run("sharding.py", tmp_path, "--rounds", "1", "--repeats", "1")
    check_bars(process, results["bars"], 22)
    assert set(results["calls"]) == {"4", "2 x 2"}
    routes = {"local", "rule", "register_sharding", "stock", "aten", "local_map"}
    assert all(set(micros) == routes for micros in results["calls"].values())
    assert {"100000", "10 x 100 x 100"} < set(results["propagation"])


def test_releases_are_shown_side_by_side(tmp_path: Path) -> None:
    files = []
    for release, row, median in (("2.13.0+cpu", "1 tensor", 1.25), ("2.15.0", "in place", 2.0)):
        routes = {route: {"median": median} for route in ("plain call", "torchop handle")}
        files.append(tmp_path / f"{release}.json")
        run = {"environment": {"torch": release}, "calls": {row: routes}}
        files[-1].write_text(json.dumps(run))
    shown = subprocess.run(
        [sys.executable, BENCHMARKS / "releases.py", *files],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    head, _, *rows = shown.stdout.splitlines()
    assert "| 2.13.0: torchop |" in head
    assert "| 2.15.0: torchop |" in head
    assert rows == [
        "| 1 tensor | 1.2 | 1.2 | - | - | - | - |",
        "| in place | - | - | - | 2.0 | 2.0 | - |",
    ]
