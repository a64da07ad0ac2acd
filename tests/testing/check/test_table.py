"""The table of checks, and the page that lists them. Uses private names."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.testing.zoo import RIGHT, WRONG, Specimen
from tests.testing.zoo import __main__ as zoo_main
from tests.testing.zoo.__main__ import PAGE, Measured, counted, each_measured, page_of, rows
from torchop.testing._check.table import CHECKS, VARIANTS

# These checks need an accelerator.
ON_DEVICES = {"subsystems.accelerator", "subsystems.capture"}


def test_checks_have_distinct_names_and_questions() -> None:
    names = Counter(check.name for check in CHECKS)
    assert max(names.values()) == 1
    assert all(check.question.endswith(("?", ".)")) for check in CHECKS)
    assert {variant.name for variant in VARIANTS.values()} == set(VARIANTS)


def test_every_check_has_a_wrong_operator() -> None:
    named = {str(specimen.check).partition("[")[0] for specimen in WRONG}
    assert {check.name for check in CHECKS} - named == ON_DEVICES


def test_page_lists_all_checks() -> None:
    """Check the columns of the page that come from the code. The last two columns are measured."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = [
        line.rsplit("|", 3)[0].rstrip() + " |" for line in lines if re.match(r"\| `\w+\.", line)
    ]
    assert found == rows()


def test_page_counts_wrong_operators() -> None:
    specimen = next(each for each in WRONG if each.check == "memory.gaps")
    right = Measured(RIGHT[0].name, ["memory.gaps"], 1, 1.0, False)
    found = Measured(specimen.name, ["memory.gaps", "subsystems.compiled"], 1, 1.0, False)
    page = page_of([found, right])
    (gaps,) = (line for line in page.splitlines() if line.startswith("| `memory.gaps`"))
    assert gaps.endswith("| 1 | 0 |")
    page = page_of([Measured(specimen.name, ["memory.gaps"], 1, 1.0, True)])
    (compiled,) = (line for line in page.splitlines() if line.startswith("| `subsystems.compiled`"))
    assert compiled.endswith("| - | - |")
    assert "without the checks that compile programs" in page


def test_measured_operators_do_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def measure(specimen: Specimen, *, quick: bool) -> Measured:
        ran.append(specimen.name)
        return Measured(specimen.name, ["memory.gaps"], 1, 1.0, quick)

    monkeypatch.setattr(zoo_main, "measure", measure)
    file = tmp_path / "results"
    for count in (1, 2):
        results = [each for _, each in each_measured(WRONG[:count], file, quick=True)]
        assert [each.failed for each in results] == [["memory.gaps"]] * count
    assert ran == [specimen.name for specimen in WRONG[:2]]


@pytest.mark.parametrize("provider", ["", "[fast]"])
def test_operators_detected_by_a_single_check_are_counted(provider: str) -> None:
    failures = [[f"memory.gaps{provider}", "values.nan"], ["values.nan"], []]
    assert counted(failures) == {"memory.gaps": (1, 0), "values.nan": (2, 1)}
