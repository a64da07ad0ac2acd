"""The report as one page of HTML: no network, for the keyboard and for phones, dark and light."""

from __future__ import annotations

import importlib.resources
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

# What stands in a cell of the matrix, beside its colour.
_SIGNS = {
    "passed": "✓",
    "failed": "✗",
    "expected failure": "!",
    "cannot be done": "\N{EN DASH}",
    "not run": "…",
}


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """The page of several operators, each as `CheckReport.to_dict` has it, with its `summary`."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")
    checks = list(dict.fromkeys(r["check"] for report in reports for r in report["results"]))
    parts = [check.partition(".") for check in checks]
    return environment.from_string(source).render(
        checks=[{"name": "".join(p), "family": p[0]} for p in parts],
        families=list(dict.fromkeys(family for family, _, _ in parts)),
        rows=[_row(number, report, checks) for number, report in enumerate(reports)],
        counts=Counter(r["outcome"] for report in reports for r in report["results"]),
        signs=_SIGNS,
        environment=reports[0]["environment"] if reports else {},
        seconds=sum(report["seconds"] for report in reports),
    )


def _row(number: int, report: Mapping[str, Any], checks: Sequence[str]) -> Mapping[str, Any]:
    results = {result["check"]: result for result in report["results"]}
    longest = max((r["seconds"] for r in report["results"]), default=0.0) or 1.0
    slowest = max(report["call_costs"].values(), default=0.0) or 1.0
    return {
        **report,
        "id": f"op{number}",
        "cells": [_cell(number, check, results.get(check)) for check in checks],
        "details": [(_id(number, check), result) for check, result in results.items()],
        "costs": [
            (result["check"], result["seconds"], 100 * result["seconds"] / longest)
            for result in sorted(report["results"], key=lambda r: -r["seconds"])[:12]
        ],
        "calls": [(way, c, 100 * c / slowest) for way, c in report["call_costs"].items()],
    }


def _cell(number: int, check: str, result: Mapping[str, Any] | None) -> Mapping[str, Any]:
    family = check.partition(".")[0]
    if result is None:
        return {"outcome": "not planned", "sign": "", "id": "", "check": check, "family": family}
    outcome = result["outcome"]
    place = _id(number, check)
    return {
        "outcome": outcome,
        "sign": _SIGNS[outcome],
        "id": place,
        "check": check,
        "family": family,
    }


def _id(number: int, check: str) -> str:
    return f"op{number}-{check.replace('.', '-')}"
