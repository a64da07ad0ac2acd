"""docs/reference/differences.md names a test for everything it claims, and those tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reference" / "differences.md").read_text()
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ROWS = re.findall(r"^\| ([ABC]\d+) \| (.+)$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("file", "test"), sorted(set(REFERENCE.findall(PAGE))))
def test_named_test_exists(file: str, test: str) -> None:
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(("entry", "row"), ROWS)
def test_entry_has_an_outcome_and_its_proof(entry: str, row: str) -> None:
    outcomes = re.findall(r"\*\*(fixed|refused|out of reach|open)\*\*", row)
    assert outcomes
    if {"fixed", "refused"} & set(outcomes):
        assert REFERENCE.search(row)


def test_every_entry_is_there() -> None:
    expected = [f"A{n}" for n in range(1, 29)] + [f"B{n}" for n in range(1, 15)]
    assert [entry for entry, _ in ROWS] == expected + [f"C{n}" for n in range(1, 13)]
