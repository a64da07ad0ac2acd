"""Draw the profiler trace in the debugging tutorial, and store it as `docs/_static/trace.svg`.

python tools/trace_picture.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parents[1] / "docs" / "_static" / "trace.svg"
WIDTH, LINE, MARGIN, TOP = 700, 26, 8, 26
LETTER = 6.7  # assumed width of a letter in pixels
OURS, OTHERS = "#0a58ca", "#4f5660"  # the contrast with white text is above 4.5 to 1


class Event(NamedTuple):
    """A bar in the picture. It shows when an operator ran.

    `depth` is the number of operators that were calling it. `start` and `end` are in microseconds.
    """

    name: str
    depth: int
    start: float
    end: float


def record() -> list[Event]:
    """Run the tutorial's program, and return the trace. The last step starts at time 0."""
    import numpy as np
    import torch
    from torch.profiler import ProfilerActivity, profile

    import torchop

    @torchop.custom_op("mylib::normalize", mutates_args=(), device_types="cpu")
    def normalize(x: torch.Tensor) -> torch.Tensor:
        array = x.numpy()
        centred = array - array.mean()
        return torch.as_tensor(centred / np.std(centred))

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(normalize(x @ weight))

    torch.set_num_threads(1)
    x, weight = torch.randn(100, 256), torch.randn(256, 256)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(20):
            step(x, weight)

    def depth(event: object) -> int:
        parent = getattr(event, "cpu_parent", None)
        return 0 if parent is None else 1 + depth(parent)

    events = [
        Event(each.name, depth(each), each.time_range.start, each.time_range.end)
        for each in trace.events()
    ]
    latest = max(event.start for event in events if event.name == "aten::matmul")
    return [event._replace(start=event.start - latest, end=event.end - latest) for event in events]


def svg(events: list[Event]) -> str:
    """Draw the events after time 0, in one row per depth. Omit names that do not fit."""
    shown = [event for event in events if event.start >= 0]
    end = max(event.end for event in shown)
    scale = (WIDTH - 2 * MARGIN) / end
    height = TOP + LINE * (1 + max(event.depth for event in shown)) + MARGIN
    names = ", ".join(f"{e.name} {e.end - e.start:.0f} µs" for e in shown if e.depth == 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>One step in time, from left to right: {escape(names)}.</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="16" fill="#1f2328">0 µs</text>',
        f'<text x="{WIDTH - MARGIN}" y="16" fill="#1f2328" text-anchor="end">{end:.0f} µs</text>',
    ]
    for event in shown:
        x, width = MARGIN + scale * event.start, max(1.0, scale * (event.end - event.start))
        y = TOP + LINE * event.depth
        colour = OURS if event.name.startswith("mylib::") else OTHERS
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 4}" fill="{colour}"/>'
        )
        if width > LETTER * len(event.name) + 8:
            parts.append(
                f'<text x="{x + 4:.1f}" y="{y + 15}" fill="#ffffff">{escape(event.name)}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(svg(record()), encoding="utf-8")
