"""If a test file imports private names, its docstring must say so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

TESTS = Path(__file__).parents[1]
MARK = "Uses private names."


def imports_private_names(text: str) -> bool:
    """Return whether a file imports a private module or a private name of torchop."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if any(name.startswith("torchop.") and re.search(r"\._(?!_)", name) for name in names):
            return True
    return False


def is_marked(text: str) -> bool:
    return (ast.get_docstring(ast.parse(text)) or "").endswith(MARK)


def test_files_that_import_private_names_are_marked() -> None:
    wrong = []
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if is_marked(text) is not imports_private_names(text):
            wrong.append(str(path.relative_to(TESTS)))
    assert wrong == [], f"use public names, or end the docstring with {MARK!r}; or remove the mark"


@pytest.mark.parametrize(
    "line",
    [
        "from torchop._core.lock import registration_lock",
        "from torchop._core import lock",
        "import torchop._core.lock",
        "def f():\n    from torchop._core.lock import registration_lock",
    ],
)
def test_import_of_a_private_name_is_detected(line: str) -> None:
    assert imports_private_names(line)


@pytest.mark.parametrize(
    "line", ["import torchop", "from torchop import native", "from torchop import __main__"]
)
def test_other_imports_are_public(line: str) -> None:
    assert not imports_private_names(line)
