"""What a package index shows of torchop: README.md.

Links of README.md are relative, which only works beside the other files, and it says how torchop is
installed from a checkout. `published` is also how the site's pages are read.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# What is installed from a checkout, and how that is said where an index has torchop.
_INSTALLED = (
    (r"WORKDIR /torchop\nCOPY \. \.\n", ""),
    (r"\s+(?:#\s+)?in\s+a\s+checkout\s+of\s+torchop", ""),
    (r"(?<!-e )'\.\[(\w+)\]'", r"'torchop[\1]'"),
    (r"(\bpip (?:install|wheel)\b[^\n`]*) \.(?=[\s`])", r"\1 torchop"),
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def published(text: str, on_index: bool) -> str:
    """A page as readers find it who may have no checkout."""
    for pattern, replacement in _INSTALLED if on_index else ():
        text = re.sub(pattern, replacement, text)
    return text


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Markdown with links into a public repository; where there is none, with the text of links."""

    def absolute(link: re.Match[str]) -> str:
        is_picture, words, target = link.groups()
        if not repository:
            return "" if is_picture else words
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{words}]({repository}/{kind}/v{version}/{target})"

    return _LINK.sub(absolute, text)


class MetadataHook(MetadataHookInterface):
    """Fills in what pyproject.toml says is dynamic."""

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
