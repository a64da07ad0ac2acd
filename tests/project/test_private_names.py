"""Tests of behaviour use public names; a file that imports private ones lists them at its top.

`
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import torchop

pytestmark = pytest.mark.project

TESTS = Path(__file__).parents[1]
SOURCES = Path(torchop.__file__).parents[1]
MARK = re.compile(r"Uses private names: ([\w., \n]+)\.$")


def private_modules(text: str) -> set[str]:
    """Return the private modules of torchop that a file imports, without `torchop.`."""
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "torchop" and re.search(r"\._(?!_)", name):
                while not is_module(parts):
                    parts.pop()
                modules.add(".".join(parts[1:]))
    return modules


def is_module(parts: list[str]) -> bool:
    path = SOURCES.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").exists()


def marked(text: str) -> set[str]:
    """Return the modules that the docstring of a file lists."""
    found = MARK.search(ast.get_docstring(ast.parse(text)) or "")
    return set(re.split(r",\s+", found[1])) if found else set()


def test_files_list_the_private_modules_that_they_import() -> None:
    wrong = {}
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if marked(text) != private_modules(text):
            wrong[str(path.relative_to(TESTS))] = sorted(private_modules(text))
    assert wrong == {}, "use a public name, or end the docstring with `Uses private names: ...`"


@pytest.mark.parametrize(
    "line",
    [
        "from torchop._core.lock import registration_lock",
        "from torchop._core import lock",
        "import torchop._core.lock",
        "def f():\n    from torchop._core.lock import registration_lock",
    ],
)
def test_a_private_module_is_found(line: str) -> None:
    text = f'"""A test. Uses private names: _core.lock."""\n\n{line}\n'
    assert private_modules(text) == marked(text) == {"_core.lock"}


@pytest.mark.parametrize(
    "line", ["import torchop", "from torchop import native", "from torchop import __main__"]
)
def test_other_modules_are_public(line: str) -> None:
    assert private_modules(line) == set()
