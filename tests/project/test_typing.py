"""Type checkers accept correct uses of operators, and report incorrect ones.

The type checkers read the samples in `typing/`. They must report an error on each line with the
marker `# ERROR`, and on no other line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.project  # slow if mypy's cache is empty

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parent / "typing"


class Report(NamedTuple):
    """The errors and revealed types that a type checker reports for each file and line."""

    checker: str
    errors: dict[tuple[str, int], str]
    revealed: dict[tuple[str, int], str]


def run_mypy(scratch: Path) -> Report:
    # Use the same settings and cache as `make lint`, because mypy takes 30 seconds without a cache.
    output = run(ROOT, "mypy", "--output=json", str(SAMPLES))
    report = Report("mypy", {}, {})
    for line in output.splitlines():
        message = json.loads(line)
        place = (Path(message["file"]).name, message["line"])
        if message["severity"] == "error":
            report.errors[place] = message["message"]
        elif message["message"].startswith("Revealed type is "):
            report.revealed[place] = message["message"].split('"')[1]
    return report


def run_basedpyright(scratch: Path) -> Report:
    config = {"typeCheckingMode": "standard", "include": [str(SAMPLES)]}
    (scratch / "pyrightconfig.json").write_text(json.dumps(config))
    output = run(
        scratch,
        *("basedpyright", "--outputjson", "--project", str(scratch)),
        *("--pythonpath", sys.executable),
    )
    report = Report("basedpyright", {}, {})
    for message in json.loads(output)["generalDiagnostics"]:
        place = (Path(message["file"]).name, message["range"]["start"]["line"] + 1)
        if message["severity"] == "error":
            report.errors[place] = message["message"]
        elif message["message"].startswith("Type of "):
            report.revealed[place] = message["message"].rpartition(' is "')[2].removesuffix('"')
    return report


def run(directory: Path, module: str, *arguments: str) -> str:
    command: Sequence[str] = (sys.executable, "-m", module, *arguments)
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stderr  # else the checker could not run
    return result.stdout


CHECKERS: dict[str, Callable[[Path], Report]] = {
    "mypy": run_mypy,
    "basedpyright": run_basedpyright,
}


@pytest.fixture(scope="module", params=CHECKERS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return CHECKERS[request.param](tmp_path_factory.mktemp("checker"))


def marked(sample: str, mark: str) -> dict[tuple[str, int], str]:
    """Map each line of a sample that contains the mark to the text after the mark."""
    lines = (SAMPLES / sample).read_text().splitlines()
    return {
        (sample, number): line.partition(f"  # {mark}: ")[2]
        for number, line in enumerate(lines, start=1)
        if f"  # {mark}: " in line
    }


def errors_in(sample: str, report: Report) -> dict[tuple[str, int], str]:
    return {place: message for place, message in report.errors.items() if place[0] == sample}


def test_right_uses_are_accepted(report: Report) -> None:
    assert errors_in("accepted.py", report) == {}


def test_only_wrong_uses_are_errors(report: Report) -> None:
    errors = errors_in("rejected.py", report)
    assert errors.keys() == marked("rejected.py", "ERROR").keys(), errors


def test_decorated_class_is_an_operator(report: Report) -> None:
    errors = errors_in("decorated.py", report)
    assert errors.keys() == marked("decorated.py", "ERROR").keys(), errors


def test_lambdas_need_no_types(report: Report) -> None:
    assert errors_in("strict.py", report) == {}


def test_wrong_calls_of_a_family_are_errors_in_mypy(report: Report) -> None:
    # Only torchop's plugin for mypy infers which parameters of a family are optional. For other
    # type checkers, every call is valid.
    expected = marked("families.py", "ERROR") if report.checker == "mypy" else {}
    errors = errors_in("families.py", report)
    assert errors.keys() == expected.keys(), errors


def test_handle_has_the_parameters_and_result_type_of_its_function(report: Report) -> None:
    revealed = {place: normalized(text) for place, text in report.revealed.items()}
    assert revealed == marked("accepted.py", "IS")


def normalized(text: str) -> str:
    """Remove modules and default values from a type, and use one kind of bracket."""
    text = re.sub(r"\w[\w.]*\.", "", text)
    text = re.sub(r" = ?\w*", "=", text)
    return text.translate(str.maketrans("()", "[]"))


@pytest.mark.parametrize(
    "text",
    [
        "torchop._define.handle.CustomOp[[x: torch._tensor.Tensor, *, n: int =], builtins.int]",
        "CustomOp[(x: Tensor, *, n: int = 3), int]",
    ],
)
def test_types_are_normalized(text: str) -> None:
    assert normalized(text) == "CustomOp[[x: Tensor, *, n: int=], int]"


def test_samples_contain_marked_lines() -> None:
    assert len(marked("rejected.py", "ERROR")) > 30
    assert len(marked("accepted.py", "IS")) == 9
    assert len(marked("families.py", "ERROR")) > 5
    assert (SAMPLES / "strict.py").read_text().count("lambda ") > 10
    assert (SAMPLES / "accepted.py").read_text().count("assert_type(") > 30
