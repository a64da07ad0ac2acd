"""The chart of what a call costs, drawn from what `benchmarks/calls.py --json` measured.

The page has it in its own markup, so that it takes the colours of the page, light or dark. The
README can only point to a file: `python docs/_extensions/chart.py` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import jinja2

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "calls.json"
PICTURE = ROOT / "docs" / "_static" / "calls.svg"

ROWS = {
    "14 tensors": "No gradient",
    "mutates one": "One of the tensors is mutated",
    "grad, saves one": "A gradient is recorded, and one tensor saved",
}
ROUTES = {
    "plain call": "the function alone",
    "torchop handle": "torchop",
    "define + impl": "define and impl",
    "custom_op": "torch.library.custom_op",
}
WIDTH, LABEL, LINE = 480, 160, 20

# Colours with a contrast of at least 4.5 to 1 on the backgrounds of the page and of GitHub.
TEMPLATE = jinja2.Template(
    """\
<svg xmlns="http://www.w3.org/2000/svg" class="calls-chart" viewBox="0 0 {{ width }} {{ height }}" \
role="img" aria-labelledby="calls-chart-title" font-family="sans-serif" font-size="13">
<title id="calls-chart-title">{{ title }}</title>
<style>
.calls-chart { --ink: #1f2328; --bar: #656d76; --ours: #0a58ca }
@media (prefers-color-scheme: dark) { {{ dark }} }
.calls-chart text { fill: var(--ink) } .calls-chart rect { fill: var(--bar) }
.calls-chart .ours { fill: var(--ours) } .calls-chart text.ours { font-weight: bold }
</style>
{% for y, text in heads -%}
<text x="0" y="{{ y }}" font-weight="bold">{{ text }}</text>
{% endfor -%}
{% for bar in bars -%}
<text x="0" y="{{ bar.y + 14 }}"{{ bar.mark }}>{{ bar.label }}</text>
<rect x="{{ label }}" y="{{ bar.y + 3 }}" width="{{ bar.width }}" height="14"{{ bar.mark }}/>
<text x="{{ label + bar.width + 6 }}" y="{{ bar.y + 14 }}"{{ bar.mark }}>{{ bar.value }}</text>
{% endfor -%}
</svg>
""",
    autoescape=True,
)
DARK = ".calls-chart { --ink: #e6edf3; --bar: #8d96a0; --ours: #6cb0ff }"


def svg(results: dict[str, Any]) -> str:
    """Draws the rows of a file of results: a group of bars for each, on one scale."""
    medians = {
        row: {route: results["calls"][row][route]["median"] for route in ROUTES if route in routes}
        for row, routes in results["calls"].items()
        if row in ROWS
    }
    most = max(value for row in medians.values() for value in row.values())
    heads, bars, y = [], [], 0
    for row, head in ROWS.items():
        heads.append((y + 15, head))
        y += LINE
        for route, value in medians[row].items():
            bars.append(
                {
                    "y": y,
                    "label": ROUTES[route].removeprefix("torch.library."),
                    "width": round(value / most * (WIDTH - LABEL - 60), 1),
                    "value": f"{value:.1f} µs",
                    "mark": jinja2.utils.markupsafe.Markup(
                        ' class="ours"' if route == "torchop handle" else ""
                    ),
                }
            )
            y += LINE
        y += 8
    return TEMPLATE.render(
        width=WIDTH,
        height=y,
        label=LABEL,
        heads=heads,
        bars=bars,
        dark=jinja2.utils.markupsafe.Markup(DARK),
        title=_in_words(medians),
    )


def _in_words(medians: dict[str, dict[str, float]]) -> str:
    groups = (
        f"{ROWS[row]}: "
        + ", ".join(f"{ROUTES[route]} {value:.1f}" for route, value in routes.items())
        for row, routes in medians.items()
    )
    return "Microseconds for one call with 14 tensors. " + ". ".join(groups) + "."


def environment(results: dict[str, Any]) -> str:
    """What the numbers hold for, in words."""
    there = results["environment"]
    torch = there["torch"].partition("+")[0]
    return f"PyTorch {torch} and Python {there['python']} on a CPU, under {there['machine']}"


def setup(app: Any) -> dict[str, bool]:
    from docutils import nodes  # only Sphinx has it, and the picture is drawn without
    from docutils.parsers.rst import Directive

    class Chart(Directive):
        """The chart, and below it what it holds for."""

        option_spec: ClassVar[dict[str, Any]] = {}

        def run(self) -> list[nodes.Node]:
            self.state.document.settings.env.note_dependency(str(RESULTS))
            results = json.loads(RESULTS.read_text(encoding="utf-8"))
            note = f"Microseconds for one call with 14 small tensors, on {environment(results)}."
            picture = nodes.raw("", svg(results), format="html")
            return [picture, nodes.paragraph("", note, classes=["calls-chart-note"])]

    app.add_directive("calls-chart", Chart)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    PICTURE.write_text(svg(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
