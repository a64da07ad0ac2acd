"""The page that compares checks: it is of this zoo, and its totals are those of its rows."""

from __future__ import annotations

from tests.testing.zoo import RIGHT, WRONG
from tests.testing.zoo.comparison import FORKS, PAGE, TOOLS, Answer, ask, page_of, rows_of


def test_the_page_has_each_operator_with_its_fault() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    specimens = {each.name: each.check or "right" for each in (*WRONG, *RIGHT)}
    assert {name: fault for name, (fault, _) in rows.items()} == specimens


def test_the_totals_are_those_of_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_of(rows_of(text)) == text
    assert page_of({"zoo::a": ("values.nan", dict.fromkeys(TOOLS, Answer("found", 2.0)))}) != text


def test_rows_agree_with_what_the_tools_say_now() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    specimens = {each.name: each for each in (*WRONG, *RIGHT)}
    for name in ("zoo::writes_undeclared", "zoo::drops_nan", "zoo::returns_kept_buffer"):
        for tool in ("opcheck", "gradcheck", "OpInfo"):
            assert ask(tool, specimens[name]).word == rows[name][1][tool].word, (name, tool)


def test_stock_tools_are_not_run_on_what_forks() -> None:
    (forks,) = [each for each in WRONG if each.name == FORKS]
    for tool in ("opcheck", "gradcheck", "OpInfo"):
        assert ask(tool, forks) == Answer("cannot")
