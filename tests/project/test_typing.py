"""Type checkers accept correct uses of operators and reject wrong ones.

The samples in `typing/` are checked, not executed. Each line of a sample that has to be an error is
marked with `# ERROR`, and no other line may be one.
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

pytestmark = pytest.mark.project  # mypy reads all of PyTorch where it has not yet

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parent / "typing"


class Report(NamedTuple):
    """The output of a type checker: errors and revealed types, by file and line."""

    checker: str
    errors: dict[tuple[str, int], str]
    revealed: dict[tuple[str, int], str]


def run_mypy(scratch: Path) -> Report:
    # With the settings of `make lint`, and so with what that keeps of PyTorch, for which mypy takes
    # 30 seconds otherwise.
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
    assert result.returncode in (0, 1), result.stderr  # 2 and up: it could not check at all
    return result.stdout


CHECKERS: dict[str, Callable[[Path], Report]] = {
    "mypy": run_mypy,
    "basedpyright": run_basedpyright,
}


@pytest.fixture(scope="module", params=CHECKERS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return CHECKERS[request.param](tmp_path_factory.mktemp("checker"))


def marked(sample: str, mark: str) -> dict[tuple[str, int], str]:
    """The lines of a sample that have a mark, and what follows it."""
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


def test_wrong_uses_are_errors_and_nothing_else_is(report: Report) -> None:
    errors = errors_in("rejected.py", report)
    assert errors.keys() == marked("rejected.py", "ERROR").keys(), errors


def test_a_decorated_class_is_an_operator(report: Report) -> None:
    errors = errors_in("decorated.py", report)
    assert errors.keys() == marked("decorated.py", "ERROR").keys(), errors


def test_lambdas_need_no_types(report: Report) -> None:
    assert errors_in("strict.py", report) == {}


def test_wrong_calls_of_a_family_are_errors_for_mypy(report: Report) -> None:
    # A type cannot make a parameter of a function optional, so others accept every call.
    expected = marked("families.py", "ERROR") if report.checker == "mypy" else {}
    errors = errors_in("families.py", report)
    assert errors.keys() == expected.keys(), errors


def test_a_handle_has_the_parameters_and_the_result_of_its_function(report: Report) -> None:
    revealed = {place: normalized(text) for place, text in report.revealed.items()}
    assert revealed == marked("accepted.py", "IS")


def normalized(text: str) -> str:
    """A type as both checkers could print it: no modules, no values of defaults, one bracket."""
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
def test_types_are_compared_in_one_spelling(text: str) -> None:
    assert normalized(text) == "CustomOp[[x: Tensor, *, n: int=], int]"


def test_there_are_samples_to_check() -> None:
    assert len(marked("rejected.py", "ERROR")) > 30
    assert len(marked("accepted.py", "IS")) == 9
    assert len(marked("families.py", "ERROR")) > 5
    assert (SAMPLES / "strict.py").read_text().count("lambda ") > 10
    assert (SAMPLES / "accepted.py").read_text().count("assert_type(") > 30
