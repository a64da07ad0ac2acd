"""Measuring calls side by side: interleaved rounds, medians, ratios, one torch thread."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

# Asking for the time costs some 300 ns, a call here 1000 ns and more: blocks this long hide the
# first, and are still short enough for many rounds to share whatever else the machine is doing.
BLOCK_SECONDS = 0.002
# How many calls come before: to warm up, and to find how many fill a block.
WARM_UP, PROBE = 200, 100
# How many come before each block, which would pay for what the block before has left otherwise.
LEAD_IN = 10


class Call(NamedTuple):
    """Something to call again and again with the same arguments."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}

    def seconds(self, times: int) -> float:
        """The processor time of this thread that this many calls take together.

        Time on the clock would grow with every other program that runs.
        """
        function, args, kwargs = self
        repetitions = itertools.repeat(None, times)
        if kwargs:
            start = time.thread_time()
            for _ in repetitions:
                function(*args, **kwargs)
            return time.thread_time() - start
        # A loop of its own: unpacking an empty mapping would be charged to every call.
        start = time.thread_time()
        for _ in repetitions:
            function(*args)
        return time.thread_time() - start


class Timing(NamedTuple):
    """Microseconds for one call, the median of the rounds; and how many calls there were in all."""

    median: float
    calls: int


class Spread(NamedTuple):
    """A number of several processes: their median, and how far they are apart."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def measure(calls: Mapping[str, Call], rounds: int) -> dict[str, Timing]:
    """Times several calls in turn.

    Every round times one block of each, starting with another one: a slow second of the machine
    falls on all of them, where timing one after the other would charge it to one.

    The garbage collector stays on. Programs run with it, so a call that leaves work for it has to
    pay for that here too; but not for going through what was there before.

    Args:
        calls: what to time, by name.
        rounds: how many blocks to time of each.
    """
    lengths = {name: _block_length(call) for name, call in calls.items()}
    gc.collect()
    gc.freeze()
    order = list(calls)
    micros: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            calls[name].seconds(LEAD_IN)
            seconds = calls[name].seconds(lengths[name])
            micros[name].append(seconds / lengths[name] * 1e6)
    return {
        name: Timing(
            statistics.median(values), WARM_UP + PROBE + rounds * (LEAD_IN + lengths[name])
        )
        for name, values in micros.items()
    }


def _block_length(call: Call) -> int:
    """Warms a call up, and finds how many of it fill a block."""
    call.seconds(WARM_UP)
    return max(1, round(BLOCK_SECONDS / (call.seconds(PROBE) / PROBE)))


# --------------------------------------------------------------------------------------------------
# The programs around a measurement


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with what every benchmark takes."""
    arguments = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE too"
    )
    return arguments


def environment() -> dict[str, str | int]:
    """What the numbers depend on besides the code."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "torch_threads": torch.get_num_threads(),
    }


def console() -> Console:
    """Where a benchmark prints: in a pipe or a dumb terminal too, there without colours."""
    # Where nobody tells a width, rich assumes 80 columns and breaks the tables.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def table(title: str, *columns: str) -> Table:
    """A table whose first column holds names and whose others hold numbers."""
    first, *others = columns
    result = Table(title=title, title_justify="left", title_style="bold")
    # On a loaded machine the numbers get longer, and would break the names.
    result.add_column(first, no_wrap=True)
    for column in others:
        result.add_column(column, justify="right")
    return result


class Bar(NamedTuple):
    """A number that a benchmark holds the library to."""

    what: str
    value: float
    limit: float
    unit: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        value, limit = (f"{number:.4g}{self.unit}" for number in (self.value, self.limit))
        return f"{verdict}  {self.what}: {value}, at most {limit}"


def print_bars(console: Console, bars: Sequence[Bar]) -> None:
    for bar in bars:
        console.print(str(bar), style="green" if bar.passed else "bold red")


def bars_as_json(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    return [{**bar._asdict(), "passed": bar.passed} for bar in bars]


def write_json(file: Path | None, results: Mapping[str, Any]) -> None:
    """Writes results with the environment they were measured in, if a file was named."""
    if file is not None:
        file.write_text(json.dumps({"environment": environment(), **results}, indent=2) + "\n")
