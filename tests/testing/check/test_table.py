"""The table of checks: what it has, and the page that publishes it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.testing.zoo import WRONG
from tests.testing.zoo.__main__ import PAGE, counted, page_of
from torchop.testing._check.table import CHECKS, VARIANTS

# They need an accelerator.
ON_DEVICES = {"subsystems.accelerator", "subsystems.capture"}


def test_names_are_distinct_and_questions_are_asked() -> None:
    names = Counter(check.name for check in CHECKS)
    assert max(names.values()) == 1
    assert all(check.question.endswith(("?", ".)")) for check in CHECKS)
    assert {variant.name for variant in VARIANTS.values()} == set(VARIANTS)


def test_every_check_has_a_wrong_operator() -> None:
    named = {str(specimen.check).partition("[")[0] for specimen in WRONG}
    assert {check.name for check in CHECKS} - named == ON_DEVICES


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_of()


@pytest.mark.parametrize("provider", ["", "[fast]"])
def test_operators_are_counted_that_a_check_finds_alone(provider: str) -> None:
    failures = [[f"memory.gaps{provider}", "values.nan"], ["values.nan"], []]
    assert counted(failures) == {"memory.gaps": (1, 0), "values.nan": (2, 1)}
