"""Limits for `calls.py`, mostly as ratios between two routes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import _compiled_graph
import _not_ours
import _structured
from _cases import (
    FOURTEEN,
    GRAD,
    GRAD_1,
    GRAD_NON_LEAVES,
    IN_MODE,
    IN_PLACE,
    INFERENCE,
    MUTATION,
    MUTATION_OF_3,
    ONE,
    OUT,
    PARAMETER,
    PROFILED,
    SAVES,
    SUBCLASS,
    TRAINING,
    TYPED,
)
from _harness import Bar
from _routes import CPP, CUSTOM_OP, HANDLE, LOW_LEVEL, OPS, PLAIN, WRITTEN

Runs = Sequence[dict[str, dict[str, float]]]


class Ratio(NamedTuple):
    """An upper limit for the time of a route, as a multiple of the time of `base`."""

    row: str
    base: str
    limit: float
    route: str = HANDLE


RATIOS = (
    Ratio(FOURTEEN.title, PLAIN, 1.12),
    Ratio(FOURTEEN.title, PLAIN, 1.20, OPS),
    Ratio(FOURTEEN.title, CUSTOM_OP, 1 / 9),
    Ratio(FOURTEEN.title, CPP, 1.0),
    Ratio(INFERENCE.title, PLAIN, 1.12),
    Ratio(TYPED.title, PLAIN, 1.15),
    *(Ratio(case.title, PLAIN, 1.15) for case in (MUTATION, MUTATION_OF_3, IN_PLACE, OUT)),
    Ratio(GRAD_1.title, PLAIN, 1.2),
    Ratio(PARAMETER.title, PLAIN, 1.25),
    # The ratios of the first prototype, plus 5% for noise.
    Ratio(GRAD.title, PLAIN, 2.3 * 1.05),
    Ratio(GRAD_NON_LEAVES.title, PLAIN, 1.7 * 1.05),
    Ratio(SAVES.title, WRITTEN, 0.5),
    Ratio(TRAINING.title, WRITTEN, 0.85),
    *(Ratio(case.title, CPP, 1.0) for case in (GRAD, TRAINING)),
    *(Ratio(case.title, LOW_LEVEL, 0.7) for case in (PROFILED, IN_MODE, SUBCLASS)),
    Ratio(_compiled_graph.TITLE, CUSTOM_OP, 1 / 1.5),
)


def bars(runs: Runs) -> list[Bar]:
    """Compare the routes within each process.

    Use the median of the ratios over all processes, and each difference from the process with the
    fastest plain call, because other load on the machine increases differences.
    """
    result = []
    for row, base, limit, route in RATIOS:
        if base not in runs[0].get(row, ()):
            continue  # no compiler for the C++ operator, or no such tag on this release
        value = statistics.median(run[row][route] / run[row][base] for run in runs)
        result.append(Bar(f"{row}: {route} / {base}", value, limit, "x"))
    # Differences, because these rows measure a fixed cost: entering and leaving a call, flattening
    # a dataclass, and detecting that an operator has no native calls.
    for title, route, limit in (
        (ONE.title, HANDLE, 0.10),
        (_structured.TITLE, HANDLE, 1.5),
        (_not_ours.TITLE, OPS, 0.02),
    ):
        quietest = min((run[title] for run in runs), key=lambda times: times[PLAIN])
        added = quietest[route] - quietest[PLAIN]
        result.append(Bar(f"{title}: {route} - {PLAIN}", added, limit, " us"))
    return result
