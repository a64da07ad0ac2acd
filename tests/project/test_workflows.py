"""The sessions and targets in CI workflows exist, and CI tests all supported releases."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
WORKFLOWS = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Parse the noxfile instead of importing it, because an import would change this process's
# environment.
NOXFILE = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
LISTS = {
    node.targets[0].id: ast.literal_eval(node.value)
    for node in NOXFILE.body
    if isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Name)
    and node.targets[0].id in ("PYTHONS", "RELEASES")
}
SESSIONS = {node.name for node in NOXFILE.body if isinstance(node, ast.FunctionDef)}
TARGETS = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[1].split()  # type: ignore[index]


def test_makefile_has_ten_targets() -> None:
    defined = re.findall(r"^([a-z][a-z -]*):(?! export)", MAKEFILE, re.MULTILINE)
    assert {name for names in defined for name in names.split()} == set(TARGETS)
    assert len(TARGETS) == 10


def test_every_session_has_a_docstring() -> None:
    public = [
        node
        for node in NOXFILE.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


def test_tests_run_with_every_supported_release() -> None:
    rows = re.findall(r'\{ python: "([\d.]+)", torch: "([\d.]+)" \}', WORKFLOWS["tests.yml"])
    assert {torch for _, torch in rows} == set(LISTS["RELEASES"])
    assert {python for python, _ in rows} <= set(LISTS["PYTHONS"])


def test_wheels_are_built_for_every_supported_release() -> None:
    matrix = re.search(r"^ +torch: \[(.+)\]$", WORKFLOWS["wheels.yml"], re.MULTILINE)
    assert matrix is not None
    assert re.findall(r'"([\d.]+)"', matrix[1]) == LISTS["RELEASES"]


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_run_existing_targets_and_sessions(workflow: str) -> None:
    commands = re.findall(
        r"(?:- run:|^ +)(.*\b(?:make|nox) .+)$", WORKFLOWS[workflow], re.MULTILINE
    )
    for command in commands:
        for target in re.findall(r"\bmake ([a-z -]+)", command):
            assert set(target.split()) <= set(TARGETS), command
        for session in re.findall(r"\bnox -s \"?(\w+)", command):
            assert session in SESSIONS, command
