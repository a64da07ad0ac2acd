"""Reports: in words, as plain values, as a table of a notebook, and as a page of HTML."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import torchop
from torchop.testing import CheckReport, Result
from torchop.testing._check.report import write_html
from torchop.testing._extras import installing

HOSTILE = '</code></pre><script>alert("x")</script> & <b>'
RESULTS = (
    Result("memory.given", "passed", question="Is it?", seconds=0.5, cases=3),
    Result("memory.gaps", "failed", f"1 is not 2 {HOSTILE}", f"f(x)  # {HOSTILE}", cases=1),
    Result("dtypes.accepted", "passed", details={"dtypes": {"float32": "-> float32"}}),
    Result("subsystems.vmap", "cannot be done", "no vmap rule"),
    Result("subsystems.fake", "expected failure", "strides (known)", "g(x)"),
    Result("subsystems.inductor", "not run", "the budget of 3 s was spent"),
)


def made(op: str = "mylib::f", results: tuple[Result, ...] = RESULTS) -> CheckReport:
    return CheckReport(op, f"{op}(Tensor x) -> Tensor", results, 7, 2.5, {"no_grad": 1.5})


def test_text_tells_what_failed_and_what_was_not_done() -> None:
    text = str(made())
    assert text.splitlines()[0] == (
        "mylib::f: 2 passed, 1 failed, 1 expected failure, 1 cannot be done, 1 not run "
        "(2.5 s, seed 7)"
    )
    for part in (
        "subsystems.vmap: cannot be done because: no vmap rule",
        "subsystems.fake: expected to fail: strides (known)",
        "subsystems.inductor: not run: the budget of 3 s was spent",
        "dtypes.accepted: dtypes: float32 -> float32",
        "most of the time: memory.given 0.50 s",
        "FAILED memory.gaps: 1 is not 2",
        "\n    f(x)  # ",
    ):
        assert part in text


def test_one_line_tells_why_several_checks_cannot_be_done() -> None:
    undone = [Result(f"subsystems.{name}", "cannot be done", "no formula") for name in "abc"]
    lines = str(made(results=(undone[0], RESULTS[0], *undone[1:]))).splitlines()
    together = "  subsystems.a, subsystems.b, subsystems.c: cannot be done because: no formula"
    assert lines.count(together) == 1
    assert sum("no formula" in line for line in lines) == 1


def test_a_failure_of_the_same_cause_is_a_line_of_the_first() -> None:
    cause = "IndexError: out of range"
    report = made(
        results=(
            Result("memory.gaps", "failed", "gaps", "first(x)", cause=cause, group="layout"),
            Result("memory.empty", "failed", "of 0", "other(x)", group="size"),
            Result("memory.single", "failed", "of 1", "second(x)", cause=cause, group="size"),
        )
    )
    text = report.in_short()
    assert [each.failure.check for each in report.findings] == ["memory.gaps", "memory.empty"]
    assert "FAILED memory.gaps: gaps\n  also fails: memory.single\n" in text
    assert "first(x)" in text
    assert "other(x)" in text
    assert "second(x)" not in text
    assert [failure.program for failure in report.failures][-1] == "second(x)"
    assert "also fails" in str(report)
    assert "also fails" not in made().in_short()


def test_failures_are_those_that_were_not_expected() -> None:
    report = made()
    assert not report.ok
    assert report.failures == (RESULTS[1],)
    assert made(results=RESULTS[:1] + RESULTS[2:5]).ok


def test_json_comes_back(tmp_path: Path) -> None:
    report = made()
    report.to_json(tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["ok"] is False
    assert values["results"][1]["check"] == "memory.gaps"
    again = CheckReport.from_dict(values)
    assert again == report
    assert str(again) == str(report)
    with pytest.raises(ValueError, match="not a report"):
        CheckReport.from_dict({**values, "format": 99})


def test_environment_names_versions_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    # As where the package is found by its path, which has no metadata.
    monkeypatch.setattr(importlib.metadata, "version", version)
    environment = made().environment
    assert environment["torchop"] == torchop.__version__
    assert set(environment) == {"torchop", "torch", "python", "platform", "devices"}
    assert environment["devices"].startswith("CPU (")


def test_table_of_a_notebook_escapes() -> None:
    table = made()._repr_html_()
    assert "<script>" not in table
    assert table.count("<td>") == 3 * len(RESULTS)


def test_table_of_a_notebook_has_the_failures_first_and_folds_what_passed() -> None:
    table, folded, passed = made()._repr_html_().partition("<details><summary>2 passed</summary>")
    assert folded
    places = [table.index(f"<td>{each.check}</td>") for each in RESULTS if each.outcome != "passed"]
    assert min(places) == table.index("<td>memory.gaps</td>")
    assert [each.check in passed for each in RESULTS] == [r.outcome == "passed" for r in RESULTS]


# --------------------------------------------------------------------------------------------------
# The page


class Page(HTMLParser):
    """The elements of a page, each with its attributes and text."""

    VOID = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)
        assert not self._open, f"never closed: {[name for name, _, _ in self._open]}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        element = (tag, {name: value or "" for name, value in attrs}, [])
        self.elements.append(element)
        if tag not in self.VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1][0] == tag, f"</{tag}> closes <{self._open[-1][0]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for _, _, text in self._open:
            text.append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str], str]]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            (attrs, "".join(text))
            for name, attrs, text in self.elements
            if name == tag and wanted.items() <= attrs.items()
        ]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html([made(), made("mylib::g", RESULTS[:1])], path)
    return path


@pytest.fixture(scope="module")
def page(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


def test_page_needs_nothing_else(file: Path, page: Page) -> None:
    text = file.read_text(encoding="utf-8")
    assert "http://" not in text
    assert "https://" not in text
    assert not page.all("link")
    assert not page.all("img")
    assert [attrs for attrs, _ in page.all("script")] == [{}]


def test_matrix_has_a_cell_for_each_result(page: Page) -> None:
    rows = page.all("tr")
    assert len(rows) == 3
    assert len(page.all("td")) == 2 * len(RESULTS)
    cells = page.all("a", class_="failed")
    ((attrs, sign),) = cells
    assert sign == "✗"
    assert attrs["aria-label"] == "memory.gaps of mylib::f: failed"
    # The cell opens the failure, with its program.
    ((_, opened),) = page.all("details", id=attrs["href"].removeprefix("#"))
    assert RESULTS[1].program in opened
    assert RESULTS[1].message in opened


def test_links_of_a_page_lead_somewhere(page: Page) -> None:
    ids = [attrs["id"] for _, attrs, _ in page.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    targets = {attrs["href"].removeprefix("#") for attrs, _ in page.all("a")}
    assert targets <= set(ids)


def test_page_has_failures_first_and_folds_the_rest(page: Page) -> None:
    opened, *groups = [
        attrs for attrs, _ in page.all("details") if attrs.get("id", "op0")[:3] == "op0"
    ]
    assert opened == {
        "id": "op0-memory-gaps",
        "data-family": "memory",
        "data-outcome": "failed",
        "open": "",
    }
    assert not [attrs for attrs in groups if "open" in attrs]
    folded = [" ".join(text.split()) for attrs, text in page.all("details", class_="group")]
    assert [text.split(" subsystems")[0] for text in folded[:3]] == [
        "! 1 expected failure ! expected failure",
        "\N{EN DASH} 1 cannot be done \N{EN DASH} cannot be done",
        "… 1 not run … not run",
    ]
    assert folded[3].startswith("✓ 2 passed ✓ passed memory.given")


def test_reasons_stand_where_one_looks(page: Page) -> None:
    summaries = [" ".join(text.split()) for _, text in page.all("summary")]
    assert "\N{EN DASH} cannot be done subsystems.vmap: no vmap rule" in summaries
    titles = [attrs.get("title") for attrs, _ in page.all("a", class_="cannot-be-done")]
    assert titles == ["subsystems.vmap: cannot be done: no vmap rule"]


def test_operators_with_failures_come_first(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html([made("mylib::a", RESULTS[:1]), made("mylib::b"), made("mylib::c")], path)
    rows = Page(path.read_text(encoding="utf-8")).all("th", scope="row")
    assert [name for _, name in rows] == ["mylib::b", "mylib::c", "mylib::a"]


def test_a_column_that_no_operator_could_do_is_hidden(page: Page) -> None:
    hidden = {attrs["title"] for attrs, _ in page.all("th", scope="col") if "hidden" in attrs}
    assert hidden == {"subsystems.vmap"}


def test_page_says_what_did_not_run_and_where_it_ran(page: Page) -> None:
    ((_, text),) = page.all("main")
    assert "no vmap rule" in text
    assert "the budget of 3 s was spent" in text
    ((_, footer),) = page.all("footer")
    assert "torch" in footer
    assert "CPU (" in footer
    assert len(page.all("dl", data_chart="calls")) == 2
    assert "1.50 µs" in text


def test_page_is_for_everybody(page: Page, file: Path) -> None:
    assert page.all("html", lang="en")
    assert page.all("meta", name="viewport")
    text = file.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert ":focus-visible" in text
    labels = page.all("label")
    assert len(labels) == len(page.all("input")) + len(page.all("select")) == 4


def test_reader_of_the_page_misses_what_is_not_closed() -> None:
    with pytest.raises(AssertionError, match="closes"):
        Page("<p><b>one</p></b>")


def test_page_without_jinja_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ModuleNotFoundError, match=re.escape(f"needs jinja2: {installing('check')}")
    ):
        made().to_html(tmp_path / "report.html")


# --------------------------------------------------------------------------------------------------
# In a browser


class Browser:
    """Chromium, driven through the WebDriver protocol, which needs nothing but HTTP."""

    def __init__(self, driver: str, chromium: str, port: int) -> None:
        self._process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._url = f"http://127.0.0.1:{port}"
        options = {
            "binary": chromium,
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        }
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        end = time.monotonic() + 60
        while True:
            try:
                session = self._ask("POST", "/session", {"capabilities": capabilities})
                break
            except urllib.error.URLError as error:
                if isinstance(error, urllib.error.HTTPError) or time.monotonic() > end:
                    self.close()
                    raise
                time.sleep(0.1)
        self._url += f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def keys(self, text: str) -> None:
        steps = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": steps}]})

    def be_a_phone(self) -> None:
        screen = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": screen}
        self._ask("POST", "/goog/cdp/execute", command)

    def close(self) -> None:
        if self._url.count("/session/"):
            self._ask("DELETE", "")
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("chromium and chromedriver are not installed (apt install chromium-driver)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    browser = Browser(driver, chromium, port)
    yield browser
    browser.close()


ARROW_RIGHT, ARROW_UP, ENTER = "\ue014", "\ue013", "\ue007"


def test_page_works_in_a_browser(browser: Browser, file: Path) -> None:
    browser.open(file.as_uri())
    shown = "return document.getElementById('shown').textContent"
    assert browser.run(shown) == "7 results shown"
    assert browser.run("return document.querySelectorAll('script').length") == 1
    # Filters, by what is chosen and by what is typed.
    browser.run(
        "const choice = document.getElementById('filter-outcome'); choice.value = 'failed';"
        "choice.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert browser.run(shown) == "1 result shown"
    browser.run("document.querySelector('button[type=reset]').click()")
    browser.run("document.getElementById('filter-operator').focus()")
    browser.keys("::g")
    assert browser.run(shown) == "1 result shown"
    hidden = "return document.querySelector('tr[data-operator=\"mylib::f\"]').hidden"
    assert browser.run(hidden) is True
    browser.run("document.getElementById('filters').reset()")
    assert browser.run("return new Promise(r => setTimeout(() => r(1), 50))") == 1
    assert browser.run(shown) == "7 results shown"


def test_folded_results_open_for_a_link_and_a_filter(browser: Browser, file: Path) -> None:
    browser.open(file.as_uri() + "?folded")
    group = "document.getElementById('op0-memory-given').closest('.group')"
    assert browser.run(f"return {group}.open") is False
    browser.run("location.hash = '#op0-memory-given'")
    assert browser.run("return new Promise(r => setTimeout(() => r(1), 50))") == 1
    assert browser.run(f"return {group}.open") is True
    # A group of which a filter leaves nothing is hidden, and one that is asked for opens.
    browser.run(
        "const choice = document.getElementById('filter-outcome'); choice.value = 'not run';"
        "choice.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert browser.run(f"return {group}.hidden") is True
    asked = "document.getElementById('op0-subsystems-inductor').closest('.group')"
    assert browser.run(f"return [{asked}.hidden, {asked}.open]") == [False, True]


def test_columns_that_are_left_out_can_be_shown(browser: Browser, file: Path) -> None:
    browser.open(file.as_uri() + "?columns")
    column = "document.querySelector('th[title=\"subsystems.vmap\"]')"
    assert browser.run(f"return {column}.hidden") is True
    browser.run("document.getElementById('show-undone').click()")
    assert browser.run(f"return {column}.hidden") is False


def test_failure_opens_by_keyboard(browser: Browser, file: Path) -> None:
    browser.open(file.as_uri() + "?keyboard")
    browser.run("document.querySelector('#matrix td a').focus()")
    browser.keys(ARROW_RIGHT)
    focused = "return document.activeElement.getAttribute('aria-label')"
    assert browser.run(focused) == "memory.gaps of mylib::f: failed"
    # Tab reaches the matrix at this cell, and leaves it from there.
    reachable = "return document.querySelectorAll('#matrix td a[tabindex=\"0\"]').length"
    assert browser.run(reachable) == 1
    browser.keys(ARROW_UP)
    assert browser.run(focused) == "memory.gaps of mylib::f: failed"
    browser.run("document.getElementById('op0-memory-gaps').open = false")
    browser.keys(ENTER)
    browser.run("return new Promise(r => setTimeout(() => r(1), 50))")
    assert browser.run("return document.getElementById('op0-memory-gaps').open") is True
    assert browser.run("return document.activeElement.tagName") == "SUMMARY"


def test_page_fits_a_phone(browser: Browser, file: Path) -> None:
    browser.be_a_phone()
    browser.open(file.as_uri() + "?phone")
    width = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.run("return document.documentElement.clientWidth") == 360
    assert browser.run(width) == 0
