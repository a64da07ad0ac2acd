"""Draw the documentation's charts from the stored results of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # needs no screen

import matplotlib.pyplot as plt

import calls
import kernels
from harness import Result

STATIC = Path(__file__).parents[1] / "docs" / "_static"
ROWS = {
    calls.FOURTEEN.title: "No gradient",
    calls.MUTATION.title: "One of the tensors is mutated",
    calls.SAVES.title: "A gradient is recorded, and one tensor saved",
}
LABELS = {
    calls.PLAIN: "the function alone",
    calls.HANDLE: "torchop",
    calls.LOW_LEVEL: "define and impl",
    calls.CUSTOM_OP: "custom_op",
}
# The colours of the light and the dark charts. Their contrast with the site's backgrounds is at
# least 4.5 to 1. The light charts have an opaque background, because README.md shows them even to
# readers who use a dark theme.
THEMES = {
    "": {"text": "#1f2328", "bar": "#656d76", "torchop": "#0a58ca", "background": "#ffffff"},
    "-dark": {"text": "#e6edf3", "bar": "#8d96a0", "torchop": "#6cb0ff", "background": "none"},
}
# Store text as text instead of as outlines. The salt determines the ids in the file, so with a
# fixed salt, the same numbers always give the same file.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "torchop"}

Groups = Mapping[str, Mapping[str, float]]


def call_groups(result: Result) -> Groups:
    """Return the microseconds for each row and variant. The keys are the labels in the chart."""
    groups = {}
    for row, title in ROWS.items():
        values = result.values(calls.TABLE, row)
        groups[title] = {label: values[name] for name, label in LABELS.items()}
    return groups


def kernel_groups(result: Result) -> Groups:
    return {row: result.values(kernels.TABLE, row) for row in map(kernels.title, kernels.SIZES)}


def draw(folder: Path = STATIC) -> None:
    found = Result("calls")
    groups = call_groups(found)
    longest = max(value for group in groups.values() for value in group.values())
    draw_bars(folder / "calls", groups, dict.fromkeys(groups, longest))
    found_kernels = kernel_groups(Result("kernels"))
    scales = {row: max(group.values()) for row, group in found_kernels.items()}
    draw_bars(folder / "kernels", found_kernels, scales)
    draw_link_preview(folder / "link.png", groups, found.environment["torch"].partition("+")[0])


def draw_bars(file: Path, groups: Groups, scales: Mapping[str, float]) -> None:
    lines = sum(len(group) + 1.5 for group in groups.values())
    for suffix, colours in THEMES.items():
        with mpl.rc_context(SVG):
            figure = plt.figure(figsize=(6.4, 0.24 * lines), layout="constrained")
            axes = figure.add_subplot()
            axes.set_axis_off()
            axes.set_xlim(-0.45, 1.2)
            place = 0.0
            for title, group in groups.items():
                axes.text(-0.45, place, title, color=colours["text"], weight="bold", va="center")
                for label, value in group.items():
                    place -= 1
                    ours = label == "torchop"
                    colour = colours["torchop" if ours else "bar"]
                    ink = colours["torchop" if ours else "text"]
                    style = {"color": ink, "va": "center", "weight": "bold" if ours else "normal"}
                    axes.barh(place, value / scales[title], 0.7, color=colour)
                    axes.text(-0.45, place, label, **style)
                    axes.text(value / scales[title] + 0.015, place, f"{value:.1f} µs", **style)
                place -= 1.5
            axes.set_ylim(place + 0.9, 0.6)
            path = file.with_name(f"{file.name}{suffix}.svg")
            figure.savefig(path, facecolor=colours["background"], metadata={"Date": None})
            plt.close(figure)


def draw_link_preview(file: Path, groups: Groups, release: str) -> None:
    """Draw the preview picture that messengers show for a link to the documentation site."""
    colours = THEMES[""]
    figure = plt.figure(figsize=(12, 6.3), dpi=100)
    figure.text(0.06, 0.84, "torchop", fontsize=46, weight="bold")
    figure.text(0.06, 0.75, "turns Python functions into PyTorch operators", fontsize=23)
    axes = figure.add_axes((0.06, 0.14, 0.8, 0.52))
    axes.set_axis_off()
    bars = [
        (label, title, groups[title][label])
        for title in (ROWS[calls.FOURTEEN.title], ROWS[calls.SAVES.title])
        for label in ("torchop", "custom_op")
    ]
    for place, (label, title, value) in enumerate(bars):
        colour = colours["torchop" if label == "torchop" else "bar"]
        axes.barh(-place, value, 0.42, color=colour)
        name = label if label == "torchop" else f"torch.library.{label}"
        words = f"{name}: {title[0].lower()}{title[1:]}"
        axes.text(0, 0.34 - place, words, fontsize=17, color=colours["text"])
        axes.text(value + 0.6, -place, f"{value:.1f} µs", fontsize=17, va="center", color=colour)
    note = f"One call with 14 small tensors, on PyTorch {release} on a CPU"
    figure.text(0.06, 0.06, note, fontsize=15, color=colours["bar"])
    numbers = ", ".join(f"{value:.1f}" for *_, value in bars)
    figure.savefig(file, metadata={"Description": numbers, "Software": None})
    plt.close(figure)
