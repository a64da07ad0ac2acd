"""Each mutant of `nox -s mutants` removes a condition that exists exactly once.

Uses private names.
"""

from __future__ import annotations

import itertools

from tests._support.common import load_tool
from torchop._native.extension.recipe import CSRC


def test_every_condition_is_there_once():
    mutants = load_tool("mutants").MUTANTS
    counts = {
        name: (CSRC / mutant.file).read_text(encoding="utf-8").count(mutant.condition)
        for name, mutant in mutants.items()
    }
    assert len(counts) > 40
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert all(mutant.without != mutant.condition for mutant in mutants.values())


def test_every_file_of_tests_is_there():
    module = load_tool("mutants")
    names = [*module.TESTS, *module.REASONS, *itertools.chain(*module.CLOSEST.values())]
    assert [name for name in names if not (module.ROOT / name).exists()] == []


def test_the_closest_tests_are_those_of_files_with_mutants():
    module = load_tool("mutants")
    assert module.CLOSEST.keys() <= {mutant.file for mutant in module.MUTANTS.values()}
