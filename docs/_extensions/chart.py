"""Charts of the costs of calls and kernels, from results of `benchmarks/calls.py` and `bench`.

Pages embed the chart as SVG, so it follows the light or dark theme. The README needs a file, and
link previews need pixels: `python docs/_extensions/chart.py` writes both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import jinja2

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "calls.json"
KERNELS = ROOT / "benchmarks" / "results" / "tuned_rms_norm.json"
PICTURE = ROOT / "docs" / "_static" / "calls.svg"
LINK_PICTURE = ROOT / "docs" / "_static" / "link.png"

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
    """Draw a group of bars for each row of the results, on one scale."""
    medians = _medians(results)
    groups = {
        ROWS[row]: {
            ROUTES[route].removeprefix("torch.library."): us for route, us in routes.items()
        }
        for row, routes in medians.items()
    }
    most = max(value for row in medians.values() for value in row.values())
    return _bars(groups, dict.fromkeys(groups, most), _in_words(medians))


def kernels_svg(comparisons: list[dict[str, Any]]) -> str:
    """Draw the results of `bench --providers`: a group for each call, each with its own scale."""
    groups: dict[str, dict[str, float]] = {}
    for found in comparisons:
        medians = {kernel["provider"]: kernel["microseconds"] for kernel in found["kernels"]}
        rows = found["call"].partition("[")[2].partition(",")[0]
        head = f"{rows} rows" if rows != "1" else "1 row"
        operator = found["operator"]["microseconds"]
        groups[head] = {name: medians[name] for name in sorted(medians)} | {"torchop": operator}
    scales = {head: max(bars.values()) for head, bars in groups.items()}
    words = (
        f"{head}: {', '.join(f'{name} {us:.1f}' for name, us in bars.items())}"
        for head, bars in groups.items()
    )
    return _bars(groups, scales, f"Microseconds for one call. {'. '.join(words)}.")


def _bars(groups: dict[str, dict[str, float]], scales: dict[str, float], title: str) -> str:
    heads, bars, y = [], [], 0
    for head, values in groups.items():
        heads.append((y + 15, head))
        y += LINE
        for label, value in values.items():
            bars.append(
                {
                    "y": y,
                    "label": label,
                    "width": round(value / scales[head] * (WIDTH - LABEL - 60), 1),
                    "value": f"{value:.1f} µs",
                    "mark": jinja2.utils.markupsafe.Markup(
                        ' class="ours"' if label == "torchop" else ""
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
        title=title,
    )


def draw_link_picture(results: dict[str, Any]) -> None:
    """Write the picture for link previews, with the text inside."""
    import matplotlib.pyplot as plt  # needed by this picture only

    medians = _medians(results)
    bars = [
        (f"{ROUTES[route]}: {ROWS[row][0].lower()}{ROWS[row][1:]}", medians[row][route], route)
        for row in ("14 tensors", "grad, saves one")
        for route in ("torchop handle", "custom_op")
    ]
    figure = plt.figure(figsize=(12, 6.3), dpi=100)
    figure.text(0.06, 0.84, "torchop", fontsize=46, weight="bold")
    figure.text(0.06, 0.75, "turns Python functions into PyTorch operators", fontsize=23)
    axes = figure.add_axes((0.06, 0.14, 0.8, 0.52))
    axes.set_axis_off()
    for place, (label, value, route) in enumerate(bars):
        colour = "#0a58ca" if route == "torchop handle" else "#656d76"
        axes.barh(-place, value, 0.42, color=colour)
        axes.text(0, 0.34 - place, label, fontsize=17, color="#1f2328")
        axes.text(value + 0.6, -place, f"{value:.1f} µs", fontsize=17, va="center", color=colour)
    note = f"One call with 14 small tensors, on {environment(results)}"
    figure.text(0.06, 0.06, note, fontsize=15, color="#656d76")
    figure.savefig(LINK_PICTURE, metadata={"Description": _in_words(medians), "Software": None})
    plt.close(figure)


def _medians(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        row: {route: results["calls"][row][route]["median"] for route in ROUTES if route in routes}
        for row, routes in results["calls"].items()
        if row in ROWS
    }


def _in_words(medians: dict[str, dict[str, float]]) -> str:
    groups = (
        f"{ROWS[row]}: "
        + ", ".join(f"{ROUTES[route]} {value:.1f}" for route, value in routes.items())
        for row, routes in medians.items()
    )
    return "Microseconds for one call with 14 tensors. " + ". ".join(groups) + "."


def environment(results: dict[str, Any]) -> str:
    """Describe the environment of the measurement."""
    there = results["environment"]
    torch = there["torch"].partition("+")[0]
    return f"PyTorch {torch} and Python {there['python']} on a CPU, under {there['machine']}"


def setup(app: Any) -> dict[str, bool]:
    from docutils import nodes  # installed with Sphinx only
    from docutils.parsers.rst import Directive

    class Chart(Directive):
        """The chart of calls, with a note about the environment."""

        option_spec: ClassVar[dict[str, Any]] = {}

        def run(self) -> list[nodes.Node]:
            self.state.document.settings.env.note_dependency(str(RESULTS))
            results = json.loads(RESULTS.read_text(encoding="utf-8"))
            note = f"Microseconds for one call with 14 small tensors, on {environment(results)}."
            picture = nodes.raw("", svg(results), format="html")
            return [picture, nodes.paragraph("", note, classes=["calls-chart-note"])]

    class Kernels(Directive):
        """The chart of an example's kernels."""

        option_spec: ClassVar[dict[str, Any]] = {}

        def run(self) -> list[nodes.Node]:
            self.state.document.settings.env.note_dependency(str(KERNELS))
            found = json.loads(KERNELS.read_text(encoding="utf-8"))
            return [nodes.raw("", kernels_svg(found), format="html")]

    app.add_directive("calls-chart", Chart)
    app.add_directive("kernels-chart", Kernels)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    PICTURE.write_text(svg(measured), encoding="utf-8")
    draw_link_picture(measured)
