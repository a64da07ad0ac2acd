"""Adapt README.md for package indexes such as PyPI.

README.md has relative links that only work inside the repository, and explains how to install
torchop from a checkout. This build hook replaces both. The documentation site also calls
`published` for each page.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Patterns that match instructions for a checkout, and the text for readers who have none.
_INSTALLED = (
    (r"WORKDIR /torchop\nCOPY \. \.\n", ""),
    (r"\s+(?:#\s+)?in\s+a\s+checkout\s+of\s+torchop", ""),
    (r"(?<!-e )'\.\[(\w+)\]'", r"'torchop[\1]'"),
    (r"(\bpip (?:install|wheel)\b[^\n`]*) \.(?=[\s`])", r"\1 torchop"),
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def published(text: str, on_index: bool) -> str:
    """Return a page. If `on_index` is true, leave out the instructions for a checkout."""
    for pattern, replacement in _INSTALLED if on_index else ():
        text = re.sub(pattern, replacement, text)
    return text


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown whose relative links point into a repository.

    If `repository` is empty, links are replaced by their text, and pictures are removed.
    """

    def absolute(link: re.Match[str]) -> str:
        is_picture, words, target = link.groups()
        if not repository:
            return "" if is_picture else words
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{words}]({repository}/{kind}/v{version}/{target})"

    return _LINK.sub(absolute, text)


class MetadataHook(MetadataHookInterface):
    """Sets the field `readme`, declared as dynamic in pyproject.toml."""

    def update(self, metadata: dict) -> None:
        root, urls = Path(self.root), metadata.get("urls", {})
        extras = root / "src" / "torchop" / "testing" / "_extras.py"
        on_index = "ON_INDEX = True" in extras.read_text(encoding="utf-8")
        text = published((root / "README.md").read_text(encoding="utf-8"), on_index)
        repository = urls.get("Repository", "").rstrip("/")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, repository, metadata["version"]),
        }
