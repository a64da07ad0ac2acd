"""`nox -s mutants` removes conditions from the C++ code. Each must occur exactly once there.

Uses private names.
"""

from __future__ import annotations

import itertools

from tests._support.common import load_tool
from torchop._native.extension.recipe import CSRC


def test_every_mutant_condition_occurs_once():
    mutants = load_tool("mutants").MUTANTS
    counts = {
        name: (CSRC / mutant.file).read_text(encoding="utf-8").count(mutant.condition)
        for name, mutant in mutants.items()
    }
    assert len(counts) > 40
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert all(mutant.without != mutant.condition for mutant in mutants.values())


def test_every_listed_test_file_exists():
    module = load_tool("mutants")
    names = [*module.TESTS, *module.REASONS, *itertools.chain(*module.CLOSEST.values())]
    assert [name for name in names if not (module.ROOT / name).exists()] == []


def test_closest_tests_are_listed_for_files_with_mutants():
    module = load_tool("mutants")
    assert module.CLOSEST.keys() <= {mutant.file for mutant in module.MUTANTS.values()}
