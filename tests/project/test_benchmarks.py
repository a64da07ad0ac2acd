"""The benchmarks run with tiny settings, and the numbers on pages come from their results.

These tests do not check how fast anything is.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from tests._support import common
from tests._support.forking import run_compiling, run_forked

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
# The number of rows in the benchmark `calls` whose operators need a tag that PyTorch has.
FORMS = sum(hasattr(torch.Tag, tag) for tag in ("inplace", "out"))
# Run each part of a benchmark in a forked process, because in a new process, importing PyTorch
# would take longer than the part itself.
FORK = """
    import json, os, sys, traceback
    sys.path.insert(0, {folder!r})
    import harness, {name} as benchmark
    {changes}

    def run_part(benchmark, part, settings):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with open(writer, "w") as results:
                    results.write(json.dumps(harness.run_here(benchmark, part, settings)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        with open(reader) as results:
            text = results.read()
        os.waitpid(child, 0)
        return json.loads(text)

    harness.run_part = run_part
    sys.argv[1:] = {options!r}
    sys.exit(harness.main(benchmark.BENCHMARK))
"""


class Run:
    """A benchmark run with the smallest settings.

    Attributes:
        tables: maps each table to its rows, and each row to the number of each variant.
        limits: the number of limits that the benchmark checked.
    """

    def __init__(
        self,
        run: Callable[..., subprocess.CompletedProcess[str]],
        name: str,
        file: Path,
        *,
        changes: str = "pass",
        **settings: int,
    ) -> None:
        words = {"json": file, "processes": 1, **settings}
        options = [word for key, value in words.items() for word in (f"--{key}", str(value))]
        program = FORK.format(folder=str(BENCHMARKS), name=name, changes=changes, options=options)
        process = run(program, timeout=300)
        assert file.exists(), process.stdout + process.stderr
        stored = json.loads(file.read_text(encoding="utf-8"))
        assert stored["environment"]["torch"] == str(torch.__version__)
        passed, failed = (process.stdout.count(word) for word in ("pass  ", "FAIL  "))
        assert process.returncode == (1 if failed else 0), process.stderr
        self.limits, self.failed = passed + failed, failed
        self.tables = {
            table: {
                row: {variant: value for variant, (value,) in variants.items()}
                for row, variants in found["rows"].items()
            }
            for table, found in stored["tables"].items()
        }
        for table, rows in self.tables.items():
            assert table in process.stdout
            assert all(row in process.stdout for row in rows)


# --------------------------------------------------------------------------------------------------
# Benchmarks


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(run_compiling, "calls", tmp_path_factory.mktemp("calls") / "results.json", rounds=1)


def test_calls_measures_every_row_and_variant(calls: Run) -> None:
    usual = {
        "plain call",
        "torchop handle",
        "torch.ops",
        "custom_op",
        "accelerated",
        "define + impl",
    }
    special = {
        "Inductor graph": {"torchop handle", "custom_op"},
        "operator of PyTorch": {"plain call", "torch.ops"},
        "dataclass, 5 fields": {"plain call", "torchop handle", "torch.ops"},
    }
    rows = calls.tables["calls"]
    assert len(rows) == 20 + FORMS
    for row, variants in rows.items():
        gradient = {"autograd.Function"} if row.startswith(("grad", "forward")) else set()
        assert set(variants) - {"C++ op"} == special.get(row, usual | gradient)
        assert all(micros > 0 for micros in variants.values())
    assert sum("C++ op" in variants for variants in rows.values()) in (0, 9)


def test_calls_checks_its_limits(calls: Run) -> None:
    with_cpp = "C++ op" in calls.tables["calls"]["14 tensors"]
    assert calls.limits == 20 + FORMS + 3 * with_cpp


def test_calls_fails_if_calls_are_not_native() -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(BENCHMARKS)!r})
        import _cases, calls, torchop
        with torchop.native.disabled():
            calls.time_row("1 tensor", calls.case_row(_cases.ONE, cpp=False), 1)
    """
    process = run_compiling(program)
    assert process.returncode == 1
    message = (
        "RuntimeError: 1 tensor: calls to torchop incremented the counters ['switched_off'] "
        "instead of ['native']."
    )
    assert message in process.stderr


@pytest.fixture(scope="module")
def registration(tmp_path_factory: pytest.TempPathFactory) -> Run:
    file = tmp_path_factory.mktemp("registration") / "results.json"
    return Run(run_forked, "registration", file, operators=6)


def test_registration_measures_every_variant(registration: Run) -> None:
    assert registration.tables["import"]["import torchop"]["torchop"] > 0
    for table in ("first use", "time"):
        assert len(registration.tables[table]) == 3
        for variants in registration.tables[table].values():
            assert set(variants) == {"torchop", "custom_op", "define + impl"}
            assert all(number > 0 for number in variants.values())
    assert registration.limits == 9


def test_eager_use_never_imports_dynamo(registration: Run) -> None:
    rows = registration.tables["imports of torch._dynamo"].values()
    assert sum(row["torchop"] for row in rows) == 0
    assert sum(row["custom_op"] for row in rows) > 0, "the count finds torch._dynamo"


def test_training_measures_memory_and_time(tmp_path: Path) -> None:
    run = Run(run_compiling, "training", tmp_path / "results.json", rounds=1)
    assert run.limits == 6
    assert run.failed == 0, "memory does not depend on the machine"
    memory = run.tables["memory"]
    assert set(memory) == set(run.tables["time"]) == {"elementwise", "attention", "dropout"}
    assert memory["elementwise"]["plain call"] == 10 * memory["elementwise"]["checkpoint"]


def test_precision_measures_each_variant(tmp_path: Path) -> None:
    run = Run(run_forked, "precision", tmp_path / "results.json", rounds=1)
    for row in run.tables["calls"].values():
        assert len(row) == 2
    assert run.limits == 3


def test_structures_measures_each_variant(tmp_path: Path) -> None:
    run = Run(run_compiling, "structures", tmp_path / "results.json", rounds=1)
    variants = {"torchop", "function", "by hand"}
    assert {row: set(cells) for row, cells in run.tables["calls"].items()} == dict.fromkeys(
        ("inference", "empty kernel", "forward + backward"), variants
    )


def test_residuals_measures_each_variant(tmp_path: Path) -> None:
    run = Run(run_forked, "residuals", tmp_path / "results.json", rounds=1)
    assert run.limits == 3
    assert set(run.tables["calls"]["inference"]) == {"torchop", "no residuals"}


def test_providers_measures_each_variant(tmp_path: Path) -> None:
    run = Run(run_forked, "providers", tmp_path / "results.json", rounds=1)
    assert run.limits == 3
    calls, selection = (run.tables[table]["2 tensors"] for table in ("calls", "selection"))
    assert set(calls) == {*selection, "one kernel"}


def test_kernels_measures_each_size(tmp_path: Path) -> None:
    run = Run(run_forked, "kernels", tmp_path / "results.json", rounds=1)
    assert run.limits == 2
    assert len(run.tables["calls"]) == 5
    for variants in run.tables["calls"].values():
        assert set(variants) == {"cpp", "reference", "torchop"}


def test_compiling_measures_compilation_and_calls(tmp_path: Path) -> None:
    run = Run(run_compiling, "compiling", tmp_path / "results.json", rounds=1, operators=2)
    assert run.limits == 10
    peak = run.tables["peak memory"]["elementwise"]
    assert set(peak) == {"out_op", "out_op, elementwise", "torchop", "custom_op", "torch.Tag.out"}
    assert peak["out_op, elementwise"] < peak["out_op"]
    for table in ("first compilation", "call in a graph"):
        for variants in run.tables[table].values():
            assert set(variants) - {"torchop, dataclass"} == {"torchop", "custom_op"}
            assert all(number > 0 for number in variants.values())


def test_sharding_measures_calls_and_propagation(tmp_path: Path) -> None:
    run = Run(run_compiling, "sharding", tmp_path / "results.json", rounds=1, repeats=1)
    assert run.limits == 22
    variants = {"local", "rule", "register_sharding", "stock", "aten", "local_map"}
    assert set(run.tables["calls"]) == {"4", "2 x 2"}
    assert all(set(row) == variants for row in run.tables["calls"].values())
    assert {"100000", "10 x 100 x 100"} < set(run.tables["propagation"])


def test_device_measures_every_table(tmp_path: Path) -> None:
    run = Run(run_forked, "device", tmp_path / "results.json", rounds=1, calls=2)
    assert len(run.tables) == 5
    for rows in run.tables.values():
        assert set(rows) == {"CPU", "elapsed"}


# --------------------------------------------------------------------------------------------------
# Numbers in README.md and in the documentation


@pytest.fixture(scope="module")
def report() -> Iterator[Any]:
    sys.path.append(str(BENCHMARKS))
    yield importlib.import_module("report")
    sys.path.remove(str(BENCHMARKS))


PAGES = [str(path.relative_to(ROOT)) for path in common.PAGES]
MEASUREMENT = re.compile(r"\b\d[\d.,]*\s*(?:us|µs|ns|ms|KB|kB|%|x|times|microseconds)(?![\w/])")
# Numbers with a unit that are not measurements, so no result of a benchmark contains them.
STATED = {
    "512 KB",  # lifetimes.md: a limit in the source
    "95 %",  # several-kernels.md: a confidence level
}


def prose(page: str) -> str:
    """Return the text of a page without its code blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^ *(```+).*?^ *\1$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_the_stored_measurements(report: Any, page: str) -> None:
    text, rest = (ROOT / page).read_text(encoding="utf-8"), prose(page)
    for passage in report.passages().get(page, ()):
        assert report.refresh(text, passage) == text, "run `python benchmarks/report.py`"
        rest = report.pattern(passage).sub("", rest)
    unexplained = set(MEASUREMENT.findall(rest)) - STATED
    assert not unexplained, "add the passages to `benchmarks/report.py`"


def test_pattern_matches_measurements() -> None:
    assert MEASUREMENT.findall("takes 1.0 us, 4x, 3 times") == ["1.0 us", "4x", "3 times"]
    assert not MEASUREMENT.search("4 xs, 2 timestamps")


def test_refresh_replaces_numbers_in_wrapped_lines(report: Any) -> None:
    page = "A call takes 1.0 us\n(1,000x). A call takes\n2 us."
    changed = report.refresh(page, "A call takes 3.25 us (20x).")
    assert changed == "A call takes 3.25 us\n(20x). A call takes\n2 us."
    with pytest.raises(ValueError, match=r"does not have this passage:\nNo call takes 1 us\."):
        report.refresh(page, "No call takes 1 us.")


@pytest.mark.parametrize("file", RESULTS, ids=[file.stem for file in RESULTS])
def test_results_have_machine_release_and_commit(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    environment = found["environment"]
    assert re.fullmatch(r"2\.\d+\.\d+.*", environment["torch"])
    assert re.fullmatch(r"[0-9a-f]{10}(-dirty)?", environment["commit"])
    assert environment["cpu"] or "was not recorded" in environment["note"]
    assert all(table["unit"] and table["rows"] for table in found["tables"].values())


def shown(svg: Path) -> list[str]:
    """Return the texts that a chart shows."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def test_charts_show_the_stored_numbers(report: Any, tmp_path: Path) -> None:
    charts = importlib.import_module("_charts")
    charts.draw(tmp_path)
    drawings = sorted(tmp_path.glob("*.svg"))
    assert len(drawings) == 4
    for drawing in drawings:
        stored = charts.STATIC / drawing.name
        assert len(shown(stored)) > 10
        assert shown(stored) == shown(drawing), "run `python benchmarks/report.py`"
    with PIL.Image.open(charts.STATIC / "link.png") as stored_link:
        assert stored_link.size == (1200, 630)
        with PIL.Image.open(tmp_path / "link.png") as link:
            assert stored_link.text["Description"] == link.text["Description"]
