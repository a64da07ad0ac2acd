"""For every claim, docs/reference/differences.md names tests, which must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "differences.md").read_text()
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ROWS = re.findall(r"^\| ([ABC]\d+) \| (.+)$", PAGE, flags=re.MULTILINE)
# The entries in the list below the tables, which names the tests of each row.
TESTED = set(re.findall(r"^- (\w+):\s+`tests/", PAGE, flags=re.MULTILINE))


@pytest.mark.parametrize(("file", "test"), sorted(set(REFERENCE.findall(PAGE))))
def test_named_test_exists(file: str, test: str) -> None:
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(("entry", "row"), ROWS)
def test_entry_has_an_outcome_and_a_test(entry: str, row: str) -> None:
    outcomes = re.findall(r"\*\*(fixed|rejected|out of reach)\*\*", row)
    assert outcomes
    if {"fixed", "rejected"} & set(outcomes):
        assert entry in TESTED


def test_page_has_every_entry() -> None:
    expected = [f"A{n}" for n in range(1, 41)] + [f"B{n}" for n in range(1, 17)]
    assert [entry for entry, _ in ROWS] == expected + [f"C{n}" for n in range(1, 18)]
