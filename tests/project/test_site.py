"""The documentation builds without warnings, and its links, structure and contrast are good.

The site also contains every page as Markdown.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from bs4 import BeautifulSoup, Tag

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", source, target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        # Block the network, which the build must not need. The sources contain the Sphinx
        # inventories of the projects to which pages link.
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    process = build(DOCS, folder)
    assert process.returncode == 0, process.stdout
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """Map the path of each page to its HTML, except for pages that show source code."""
    return {
        page.relative_to(site).as_posix(): page.read_text(encoding="utf-8")
        for page in site.rglob("*.html")
        if "_modules" not in page.parts
    }


# --------------------------------------------------------------------------------------------------
# Build


def test_documentation_builds_without_a_warning_or_a_network(site: Path) -> None:
    assert (site / "index.html").exists()
    assert len(list((site / "reference" / "api").glob("*.html"))) > 60


@pytest.fixture(scope="module")
def other_site(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Build a site with a broken link, and return the output of Sphinx and the folder."""
    root = tmp_path_factory.mktemp("other")
    docs = root / "docs"
    for folder in DOCS.glob("_*"):
        if folder.name != "_build":
            shutil.copytree(folder, docs / folder.name)
    (docs / "reference").mkdir()
    (docs / "reference" / "index.md").write_text("---\norphan: true\n---\n# Reference\n")
    (docs / "conf.py").write_text((DOCS / "conf.py").read_text(encoding="utf-8"))
    (docs / "index.md").write_text("# Title\n\n[missing](nowhere.md)\n")
    (root / "pyproject.toml").write_text(
        "[project.urls]\n"
        'Repository = "https://github.com/owner/name"\n'
        'Documentation = "https://docs.example.org/"\n'
    )
    process = build(docs, root / "html")
    assert process.returncode != 0
    return process.stdout, root / "html"


def test_build_fails_on_a_warning(other_site: tuple[str, Path]) -> None:
    said, _ = other_site
    assert "nowhere.md" in said


def test_project_urls_add_edit_links_and_preview_images(
    other_site: tuple[str, Path],
) -> None:
    _, folder = other_site
    page = (folder / "index.html").read_text(encoding="utf-8")
    for part in (
        'href="https://github.com/owner/name/edit/main/docs/index.md"',
        '<meta property="og:url" content="https://docs.example.org/index.html"',
        '<meta property="og:image" content="https://docs.example.org/_static/link.png"',
    ):
        assert part in page


# --------------------------------------------------------------------------------------------------
# Links and structure


def broken_links(site: Path, pages: dict[str, str]) -> list[str]:
    """Return all links and images whose target does not exist."""
    anchors: dict[Path, set[str]] = {}
    broken = []
    for page, html in pages.items():
        for address in sorted(set(re.findall(r'<[^>]+\b(?:href|src)="([^"]*)"', html))):
            target, _, fragment = urllib.parse.unquote(address).partition("#")
            target = target.partition("?")[0]
            if re.match(r"[a-z]+:", target):
                continue
            file = (site / page).parent.joinpath(target).resolve() if target else site / page
            if file.is_dir():
                file /= "index.html"
            if not file.exists():
                broken.append(f"{page}: {address}")
            elif fragment and file.suffix == ".html":
                if file not in anchors:
                    text = file.read_text(encoding="utf-8")
                    anchors[file] = set(re.findall(r'\bid="([^"]+)"', text))
                if fragment not in anchors[file]:
                    broken.append(f"{page}: {address}")
    return broken


def test_no_internal_link_is_broken(site: Path, pages: dict[str, str]) -> None:
    assert broken_links(site, pages) == []


def test_broken_link_is_detected(site: Path) -> None:
    text = '<a href="nowhere.html">a</a> <a href="index.html#nowhere">b</a> <a href="#c">c</a>'
    text += ' <a href="index.html">d</a> <img src="no.png">'
    found = broken_links(site, {"index.html": text})
    assert {line.split(": ")[1] for line in found} == {
        "nowhere.html",
        "index.html#nowhere",
        "#c",
        "no.png",
    }


def test_pages_load_no_external_files(pages: dict[str, str]) -> None:
    loaded = re.compile(r'<(?:script|img|iframe|link)\b[^>]+\b(?:href|src)="(?:https?:)?//[^"]*"')
    assert loaded.search('<script async src="https://cdn.example/x.js"></script>')
    for page, html in pages.items():
        assert not loaded.search(html), page


def test_pages_have_the_structure_that_screen_readers_need(pages: dict[str, str]) -> None:
    # Check only two API pages, because all API pages use the same template.
    api = ("reference/api/torchop.CustomOp", "reference/api/torchop.register_fake")
    for page in (name for name in pages if "/api/" not in name or name.startswith(api)):
        soup = BeautifulSoup(pages[page], "html.parser")
        html = soup.find("html")
        assert isinstance(html, Tag)
        assert html.get("lang") == "en", page
        assert soup.title is not None, page
        assert soup.title.get_text().strip(), page
        assert soup.find("meta", attrs={"name": "viewport"}), page
        assert len(soup.select("article h1")) <= 1, page
        levels = [int(heading.name[1]) for heading in soup.select("article h1, h2, h3, h4")]
        for before, after in itertools.pairwise(levels):
            assert after <= before + 1, f"{page}: a heading of level {after} after {before}"
        for image in soup.select("article img"):
            assert image.get("alt"), f"{page}: {image}"


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour such as #1f2328, as defined by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Test both variants of each chart. The colours are the backgrounds of light and dark pages in the
# furo theme.
@pytest.mark.parametrize(("suffix", "background"), [("", "#ffffff"), ("-dark", "#131416")])
def test_text_of_charts_has_enough_contrast(site: Path, suffix: str, background: str) -> None:
    for chart in (f"calls{suffix}.svg", f"kernels{suffix}.svg"):
        drawing = (site / "_images" / chart).read_text(encoding="utf-8")
        colours = set(re.findall(r"fill: (#[0-9a-f]{6})", drawing)) - {"#ffffff"}
        assert colours
        for colour in colours:
            dark, light = sorted((luminance(colour), luminance(background)))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (chart, colour)


def test_page_of_an_object_starts_with_its_summary(pages: dict[str, str]) -> None:
    signatures = {}
    for page in (name for name in pages if "/api/" in name):
        article = pages[page].partition("</h1>")[2].partition("<footer")[0]
        assert re.match(r"\s*<p>[A-Z]", article), page
        signatures[page] = article.count('<dt class="sig ')
    # `custom_op` must have one signature on its page, although its type has two overloads. `define`
    # must have two.
    assert signatures["reference/api/torchop.custom_op.html"] == 1
    assert signatures["reference/api/torchop.define.html"] == 2


# --------------------------------------------------------------------------------------------------
# Markdown for language models


def test_every_page_exists_as_markdown_and_is_listed(site: Path, pages: dict[str, str]) -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    written = {page.relative_to(site).as_posix() for page in site.rglob("*.md")}
    assert written >= set(listed)
    shelves = {page for page in written if "/" in page}
    assert shelves == set(listed)
    without = {"genindex.html", "search.html", "py-modindex.html"}
    assert {page.replace(".html", ".md") for page in set(pages) - without} == written


def test_markdown_contains_no_html(site: Path) -> None:
    for page in site.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# "), page
        code_taken_out = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        code_taken_out = re.sub(r"`[^`]*`", "", code_taken_out)
        assert not re.search(r"</?(?:div|span|section|a|p)\b|\{toctree\}|¶", code_taken_out), page
    text = (site / "reference" / "api" / "torchop.custom_op.md").read_text(encoding="utf-8")
    assert "```python\ntorchop.custom_op(name: str, " in text
    assert "[source]" not in text
    front = (site / "index.md").read_text(encoding="utf-8")
    source = (DOCS / "index.md").read_text(encoding="utf-8")
    block = source[source.index("```python") : source.index("```output")]
    assert block in front
