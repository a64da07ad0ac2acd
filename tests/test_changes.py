"""Each change that users notice is a file of its own, which the changelog takes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_change_says_what_kind_it_is() -> None:
    kinds = re.findall(r'^directory = "(\w+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert kinds.pop(0) == "changes"
    assert len(kinds) == 4
    files = {file.name for file in (ROOT / "changes").iterdir()} - {"README.md"}
    pattern = re.compile(rf"[\w-]+\.({'|'.join(kinds)})\.md")
    assert [name for name in files if not pattern.fullmatch(name)] == []


def test_each_change_fits_the_lines_of_the_changelog() -> None:
    files = [file for file in (ROOT / "changes").iterdir() if file.name != "README.md"]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert [name for name, text in texts.items() if max(map(len, text.split("\n"))) > 100] == []


def test_the_changelog_has_the_line_below_which_they_go() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    before, _, after = text.partition("<!-- towncrier release notes start -->\n")
    assert "## [" not in before
    assert after.startswith("\n## [")
