"""Write a Markdown copy of each page, and `llms.txt`, the list of pages (see llmstxt.org)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup, Tag
from markdownify import MarkdownConverter
from sphinx.application import Sphinx

SHELVES = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "explanation": "Explanation",
    "reference": "Reference",
    "dev": "Contributing",
}
# Elements that are only useful in a browser. The Markdown copies of the pages leave them out.
DROPPED = "a.headerlink, .viewcode-link, svg, style, script, .visually-hidden"


class _Converter(MarkdownConverter):  # type: ignore[misc]  # it has no types
    def convert_dt(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        """Render a `<dt>` as code if it is the signature of an object, and otherwise in bold."""
        if "sig" not in (element.get("class") or ()):
            return f"\n\n**{text.strip()}**\n"
        code = re.sub(r"\s*\n\s*", " ", element.get_text())
        return f"\n\n```python\n{code.replace('( ', '(').replace(', )', ')').strip()}\n```\n"

    def convert_dd(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        return f"\n{text.strip()}\n"


def markdown(html: str) -> str:
    """Convert the main part of an HTML page to Markdown."""
    # Cut out the article before parsing, since parsing the sidebars would take most of the time.
    html = html[html.index("<article") : html.index("</article>")]
    article = BeautifulSoup(html, "html.parser").find("article")
    assert isinstance(article, Tag), "every page of the theme has an article"
    for element in article.select(DROPPED):
        element.decompose()
    for link in article.select("a.internal[href]"):
        link.attrs.pop("title", None)
        link["href"] = re.sub(r"\.html(?=#|$)", ".md", str(link["href"]))
    text = _Converter(
        heading_style="ATX",
        bullets="-",
        escape_underscores=False,
        escape_asterisks=False,
        code_language_callback=_language,
    ).convert_soup(article)
    # Collapse empty lines, except inside code blocks.
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"\n{3,}", "\n\n", part) for part in parts[::2]]
    return "".join(parts).strip() + "\n"


def _language(element: Tag) -> str:
    for parent in element.parents:
        for name in parent.get("class") or ():
            if name.startswith("highlight-"):
                language = name.removeprefix("highlight-")
                return "" if language in {"default", "output", "text"} else language
    return ""


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    texts = {}
    for name in sorted(app.env.found_docs):
        texts[name] = markdown((folder / f"{name}.html").read_text(encoding="utf-8"))
        (folder / f"{name}.md").write_text(texts[name], encoding="utf-8")
    (folder / "llms.txt").write_text(contents(texts), encoding="utf-8")


def contents(texts: dict[str, str]) -> str:
    """Return `llms.txt`: a Markdown list of all pages by folder, each with its first sentence."""
    lines = ["# torchop", "", f"> {_first_sentence(texts['index'])}", ""]
    for shelf, title in SHELVES.items():
        lines += [f"## {title}", ""]
        for name, text in texts.items():
            if name.startswith(f"{shelf}/"):
                head = text.splitlines()[0].removeprefix("# ").replace("`", "")
                lines.append(f"- [{head}]({name}.md): {_first_sentence(text)}")
        lines.append("")
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    paragraphs = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL).split("\n\n")
    plain = [p for p in paragraphs if p.strip() and not p.lstrip().startswith(("#", "|", "-", ">"))]
    if not plain:
        return "A list of pages."
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(plain[0].split()))
    return re.split(r"(?<=[.?])\s", words)[0]


def point_to_markdown(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    if doctree is not None:
        target = f"{page.rpartition('/')[2]}.md"
        context["metatags"] = (
            context.get("metatags", "")
            + f'\n<link rel="alternate" type="text/markdown" href="{target}" />'
        )


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", point_to_markdown)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
