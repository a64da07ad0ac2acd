"""The built documentation: its links, its structure, its colours, and what a browser shows."""

from __future__ import annotations

import functools
import http.server
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup, Tag

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Where a test leaves what a person should look at.
SCREENSHOTS = DOCS / "_build" / "screenshots"
WIDTHS = {390: 844, 768: 1024, 1400: 900}
# A page of each kind: the front page, code, a list, a signature, tables, messages.
PAGES = [
    "index",
    "tutorials/getting-started",
    "reference/index",
    "reference/api/torchop.custom_op",
    "reference/schema-types",
    "reference/errors",
    "reference/differences",
]
# Of the pages that one template makes.
API = ("reference/api/torchop.CustomOp", "reference/api/torchop.register_fake")


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", source, target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        # No request leaves the machine: the inventories of other projects are in the sources.
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
    """The pages that we write, by their path. Those with sources have no structure of ours."""
    return {
        page.relative_to(site).as_posix(): page.read_text(encoding="utf-8")
        for page in site.rglob("*.html")
        if "_modules" not in page.parts
    }


# --------------------------------------------------------------------------------------------------
# The build


def test_documentation_builds_without_a_warning_or_a_network(site: Path) -> None:
    assert (site / "index.html").exists()
    assert len(list((site / "reference" / "api").glob("*.html"))) > 60


@pytest.fixture(scope="module")
def other_site(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the build said of a site with a broken link, in a project that has addresses; and it."""
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


def test_addresses_of_the_project_bring_edit_links_and_pictures(
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
    """The links and images of pages that lead nowhere."""
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


def test_a_broken_link_is_found(site: Path) -> None:
    text = '<a href="nowhere.html">a</a> <a href="index.html#nowhere">b</a> <a href="#c">c</a>'
    text += ' <a href="index.html">d</a> <img src="no.png">'
    found = broken_links(site, {"index.html": text})
    assert {line.split(": ")[1] for line in found} == {
        "nowhere.html",
        "index.html#nowhere",
        "#c",
        "no.png",
    }


def test_pages_load_nothing_from_elsewhere(pages: dict[str, str]) -> None:
    loaded = re.compile(r'<(?:script|img|iframe|link)\b[^>]+\b(?:href|src)="(?:https?:)?//[^"]*"')
    assert loaded.search('<script async src="https://cdn.example/x.js"></script>')
    for page, html in pages.items():
        assert not loaded.search(html), page


def test_pages_have_the_structure_that_readers_of_screens_need(
    pages: dict[str, str],
) -> None:
    for page in (name for name in pages if "/api/" not in name or name.startswith(API)):
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


def test_the_page_of_an_object_begins_with_what_it_is_for(pages: dict[str, str]) -> None:
    signatures = {}
    for page in (name for name in pages if "/api/" in name):
        article = pages[page].partition("</h1>")[2].partition("<footer")[0]
        assert re.match(r"\s*<p>[A-Z]", article), page
        signatures[page] = article.count('<dt class="sig ')
    # A decorator has one, also where its type has two; `define` has two ways to name the operator.
    assert signatures["reference/api/torchop.custom_op.html"] == 1
    assert signatures["reference/api/torchop.define.html"] == 2


def test_pages_tell_search_engines_and_messengers_what_they_are_about(
    pages: dict[str, str],
) -> None:
    front = pages["index.html"]
    assert '<meta name="description" content="torchop turns Python functions into' in front
    assert '<meta property="og:title" content="torchop"' in front
    page = pages["reference/api/torchop.custom_op.html"]
    assert '<meta name="description" content="Turn a function into an operator' in page


# --------------------------------------------------------------------------------------------------
# For assistants


def test_every_page_is_there_as_markdown_and_listed(site: Path, pages: dict[str, str]) -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    written = {page.relative_to(site).as_posix() for page in site.rglob("*.md")}
    assert written >= set(listed)
    shelves = {page for page in written if "/" in page}
    assert shelves == set(listed)
    without = {"genindex.html", "search.html", "py-modindex.html"}
    assert {page.replace(".html", ".md") for page in set(pages) - without} == written


def test_markdown_is_clean(site: Path) -> None:
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


# --------------------------------------------------------------------------------------------------
# Colours


def luminance(colour: str) -> float:
    """The relative luminance of a colour such as #1f2328, as WCAG 2 defines it."""
    digits = colour.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def variables(text: str) -> dict[str, str]:
    """The colours that a rule of a style sheet sets."""
    return dict(re.findall(r"(--[\w-]+):\s*(#[0-9a-fA-F]{3,6})\b", text))


def test_colours_of_the_theme_and_the_chart_have_contrast(site: Path) -> None:
    theme = (site / "_static" / "styles" / "furo.css").read_text(encoding="utf-8")
    rules = {
        "light": [r"\bbody\{(--font[^}]*|[^}]*--color-background-primary[^}]*)\}"],
        "dark": [r"body\[data-theme=dark\]\{([^}]*)\}"],
    }
    for scheme, patterns in rules.items():
        colours: dict[str, str] = {}
        for pattern in patterns:
            for rule in re.findall(pattern, theme):
                colours |= variables(rule)
        background = colours["--color-background-primary"]
        for name in ("--color-foreground-primary", "--color-foreground-secondary"):
            assert contrast(colours[name], background) >= 4.5, (scheme, name)
        suffix = "-dark" if scheme == "dark" else ""
        for chart in (f"calls{suffix}.svg", f"kernels{suffix}.svg"):
            drawing = (site / "_images" / chart).read_text(encoding="utf-8")
            for colour in set(re.findall(r"fill: (#[0-9a-f]{6})", drawing)) - {"#ffffff"}:
                assert contrast(colour, background) >= 4.5, (chart, colour)


# --------------------------------------------------------------------------------------------------
# In a browser


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of the site: a page opened as a file may not load the search index."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium-driver)")
    # Only here: it imports many packages.
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    for switch in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "hide-scrollbars",
        f"user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()


def show(browser: Any, address: str, width: int, scheme: str = "light") -> None:
    """Opens a page, with the width of the screen and the scheme of colours."""
    size = {"width": width, "height": WIDTHS[width], "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
    motion = {"name": "prefers-reduced-motion", "value": "reduce"}
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": "", "features": [scheme_feature, motion]}
    )
    browser.get(address)


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


# What is wider than the screen and cannot be scrolled by itself.
OVERFLOW = """
const wide = [], SCROLLS = ["auto", "scroll", "hidden"];
const limit = document.documentElement.clientWidth;
if (document.scrollingElement.scrollWidth > limit) wide.push("the page");
for (const element of document.querySelectorAll("article *")) {
  const box = element.getBoundingClientRect();
  if (box.width === 0 || box.right <= limit + 1) continue;
  let holder = element;
  while (holder.tagName !== "ARTICLE" && !SCROLLS.includes(getComputedStyle(holder).overflowX))
    holder = holder.parentElement;
  if (holder.tagName === "ARTICLE") wide.push(element.tagName + "." + element.className);
}
return wide;
"""

# Code with a line that the screen cuts off.
CUT = """
return [...document.querySelectorAll("article pre")]
  .filter(block => block.scrollWidth > block.clientWidth)
  .map(block => block.textContent.slice(0, 40));
"""

# The bottom of the chart of the theme that is shown.
CHART = """
const charts = [...document.querySelectorAll("img.only-light, img.only-dark")];
return Math.max(...charts.map(chart => chart.getBoundingClientRect().bottom));
"""

# Texts whose colour is too near to that of what is behind them: WCAG AA.
CONTRAST = """
function parse(colour) {
  const parts = colour.match(/[\\d.]+/g).map(Number);
  return parts.length === 3 ? [...parts, 1] : parts;
}
function luminance(c) {
  const [r, g, b] = c.map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}
function over(front, back) {
  return [0, 1, 2].map(i => front[i] * front[3] + back[i] * (1 - front[3]));
}
function behind(element) {
  const layers = [];
  for (let e = element; e; e = e.parentElement)
    layers.push(parse(getComputedStyle(e).backgroundColor));
  return layers.reverse().reduce((back, layer) => over(layer, back), [255, 255, 255]);
}
const poor = [], seen = new Set(), VISIBLE = {opacityProperty: true, visibilityProperty: true};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  const text = texts.currentNode.data.trim();
  if (!text || !element.checkVisibility(VISIBLE)) continue;
  if (element.closest("script, style, noscript")) continue;
  const style = getComputedStyle(element), back = behind(element);
  const colour = element.closest("svg") ? style.fill : style.color;
  const front = over(parse(colour), back);
  const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b);
  const ratio = (high + .05) / (low + .05), size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  const key = [colour, back, large].join();
  if (ratio < (large ? 3 : 4.5) && !seen.has(key)) {
    seen.add(key);
    poor.push(`${ratio.toFixed(2)} ${colour} on ${back.map(Math.round)}: ${text.slice(0, 30)}`);
  }
}
return poor;
"""

# Code that looks like a link and is none.
UNDERLINED = """
return [...document.querySelectorAll(".highlight span")]
  .filter((part) => !part.closest("a") && getComputedStyle(part).textDecorationLine !== "none")
  .map((part) => part.textContent);
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_screen_and_can_be_read(browser: Any, address: str, width: int) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    wrong = []
    for page in PAGES:
        for scheme in ("light", "dark"):
            show(browser, f"{address}/{page}.html", width, scheme)
            place = f"{page} at {width}, {scheme}"
            wrong += [f"{place}: {found} is too wide" for found in browser.execute_script(OVERFLOW)]
            wrong += [f"{place}: contrast {found}" for found in browser.execute_script(CONTRAST)]
            wrong += [f"{place}: {each} has a line" for each in browser.execute_script(UNDERLINED)]
            wrong += [f"{place}: {message}" for message in errors(browser)]
            if page == "index":
                assert browser.execute_script(CUT) == [], place
                assert browser.execute_script(CHART) < WIDTHS[width], place
            file = SCREENSHOTS / f"{page.replace('/', '-')}-{width}-{scheme}.png"
            assert browser.save_screenshot(str(file))
    assert wrong == []


def test_the_checks_of_the_browser_can_fail(browser: Any, address: str) -> None:
    show(browser, f"{address}/index.html", 390)
    browser.execute_script(
        "const p = document.createElement('p'); p.textContent = 'W'.repeat(100);"
        "p.style.color = '#999999'; p.style.width = '2000px';"
        "document.querySelector('article').append(p);"
    )
    browser.execute_script("document.querySelector('pre').append('# '.repeat(26))")
    module = "document.querySelector('.highlight .nn')"
    browser.execute_script(f"{module}.style.setProperty('text-decoration','underline','important')")
    assert browser.execute_script(UNDERLINED) == ["numpy"]
    assert len(browser.execute_script(CUT)) == 1
    assert "P." in browser.execute_script(OVERFLOW)
    assert any("WWW" in found for found in browser.execute_script(CONTRAST))
    browser.get(f"{address}/nowhere.html")
    assert any("404" in message for message in errors(browser))


def test_the_scheme_follows_the_switch(browser: Any, address: str) -> None:
    show(browser, f"{address}/index.html", 1400, "light")
    background = "return getComputedStyle(document.body).backgroundColor"
    before = browser.execute_script(background)
    browser.find_element("css selector", ".content-icon-container .theme-toggle").click()
    after = {browser.execute_script(background)}
    browser.find_element("css selector", ".content-icon-container .theme-toggle").click()
    after.add(browser.execute_script(background))
    assert after - {before}
    browser.execute_script("localStorage.clear()")
    errors(browser)


def test_search_finds_first_what_is_named_like_the_query(browser: Any, address: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    def found(driver: Any) -> bool:
        return "finished" in driver.find_element("id", "search-results").text

    for query, page in (
        ("opcheck", "reference/api/torchop.opcheck.html"),
        ("gradient None", "tutorials/debugging.html#a-gradient-is-none"),
        ("command line", "how-to/command-line.html"),
        ("several kernels", "how-to/several-kernels.html"),
    ):
        show(browser, f"{address}/search.html?q={query.replace(' ', '+')}", 390)
        WebDriverWait(browser, 30).until(found)
        first = browser.find_element("css selector", "#search-results li a")
        assert re.sub(r"\?[^#]*", "", first.get_attribute("href")) == f"{address}/{page}", query
    assert errors(browser) == []


def test_the_keyboard_reaches_content_search_and_navigation(browser: Any, address: str) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, f"{address}/tutorials/getting-started.html", 1400)
    active = "const e = document.activeElement; return e.className + ' ' + e.name + ' ' + e.href"
    reached = []
    for _ in range(30):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.execute_script(active))
        outline = "const s = getComputedStyle(document.activeElement); return s.outlineStyle"
        assert browser.execute_script(outline) != "none" or "sidebar-search" in reached[-1]
    assert "skip-to-content" in reached[0]
    assert any("sidebar-search" in each for each in reached)
    assert any("how-to" in each for each in reached)


def test_a_button_copies_code_and_no_output(browser: Any, address: str) -> None:
    show(browser, f"{address}/index.html", 1400)
    blocks = "return [...document.querySelectorAll('article div.highlight')].map(block => "
    blocks += "[block.parentElement.className.split(' ')[0], !!block.querySelector('.copybtn')])"
    found = browser.execute_script(blocks)
    assert ["highlight-python", True] in found
    assert ["highlight-output", False] in found
    assert len({tuple(block) for block in found}) == len({language for language, _ in found})


def test_the_menu_opens_on_a_phone(browser: Any, address: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, f"{address}/index.html", 390)
    link = browser.find_element("css selector", ".sidebar-tree a[href*='how-to']")
    left = "return arguments[0].getBoundingClientRect().left"
    assert browser.execute_script(left, link) < 0
    browser.find_element("css selector", "label[for=__navigation].nav-overlay-icon").click()
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(left, link) >= 0)
    assert errors(browser) == []
