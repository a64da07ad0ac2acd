"""Pages are short, say who reads them, and link terms to the glossary."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

pytestmark = pytest.mark.project

DOCS = Path(__file__).parents[2] / "docs"
GLOSSARY = DOCS / "reference" / "glossary.md"
# The page `changelog.md` includes the changelog, and `index.md` starts with what torchop does.
PAGES = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if "_build" not in path.parts and path.name != "changelog.md" and path != DOCS / "index.md"
]
MOST_WORDS = 900
# Terms of the glossary that pages use in their everyday or PyTorch meaning too.
EVERYDAY = {"effect", "extension", "family", "form", "handle", "kernel", "opaque", "operator"}
EVERYDAY |= {"reference", "rule", "schema", "structure"}
PARSER = MarkdownIt("commonmark").enable("table")


class Text(NamedTuple):
    """The text of a heading, paragraph or table cell.

    `linked` is the text of links and of emphasized words, which the page defines. `plain` is the
    other text without code. A character that is not part of a word separates the parts.
    """

    kind: str
    words: list[str]
    plain: str
    linked: str


def texts(markdown: str) -> Iterator[Text]:
    """Yield the texts outside of code blocks."""
    tokens = PARSER.parse(markdown)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type != "inline":
            continue
        assert before is not None
        plain = linked = shown = ""
        in_link = False
        for child in token.children or []:
            opens, closes = {"link_open", "em_open"}, {"link_close", "em_close"}
            in_link = child.type in opens or (in_link and child.type not in closes)
            text = " " if child.type == "softbreak" else child.content
            shown += text
            if child.type not in {"text", "softbreak"}:
                plain, linked = plain + "\0", linked + "\0"
            elif in_link:
                linked += text
                plain += "\0"
            else:
                plain += text
        yield Text(before.type.removesuffix("_open"), shown.split(), plain, linked)


@functools.cache
def pattern(term: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(term)}s?(?![\w-])", re.IGNORECASE)


def terms() -> list[str]:
    rows = re.findall(r"^\| ([\w ]+) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [term for term in rows if term not in EVERYDAY | {"term"}]


def unlinked(markdown: str) -> list[str]:
    """Return the terms of the glossary whose first use in a text is not a link."""
    found, seen = [], set()
    for text in texts(markdown):
        for term in terms() if text.kind != "heading" else ():
            is_linked = pattern(term).search(text.linked) is not None
            is_plain = pattern(term).search(text.plain) is not None
            if is_plain and not is_linked and term not in seen:
                found.append(term)
            if is_plain or is_linked:
                seen.add(term)
    return found


def length(markdown: str) -> int:
    return sum(len(text.words) for text in texts(markdown))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "reference"], ids=lambda page: page.stem
)
def test_page_is_short(page: Path) -> None:
    assert length(page.read_text(encoding="utf-8")) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_starts_with_its_readers_and_its_aim(page: Path) -> None:
    first = next(text for text in texts(page.read_text(encoding="utf-8")) if text.kind != "heading")
    assert re.match(r"This page is for .+?\. [A-Z]", " ".join(first.words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_links_each_term_at_its_first_use(page: Path) -> None:
    if page != GLOSSARY:
        assert unlinked(page.read_text(encoding="utf-8")) == []


def test_terms_without_a_link_are_found() -> None:
    assert {"dispatcher", "native call", "fake kernel", "provider"} <= set(terms())
    page = "# Providers\n\nA [fake kernel](g.md) and `a provider`.\n\n| the dispatcher |\n| --- |\n"
    assert unlinked(page) == ["dispatcher"]
    assert unlinked("Fake kernels. A [fake kernel](g.md).") == []
    assert unlinked("Fake kernels.\n\nA [fake kernel](g.md).") == ["fake kernel"]


def test_words_of_code_blocks_are_not_counted() -> None:
    assert length("# A title\n\nThree [more words](page.md).\n\n```python\nx = 1\n```\n") == 5
