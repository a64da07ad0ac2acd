"""Measure calls in interleaved rounds, and report medians and limits."""

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

# Reading the clock takes 300 ns, and a call 1000 ns or more. Blocks of this length hide the former,
# and are short enough that other load on the machine affects all calls alike.
BLOCK_SECONDS = 0.002
# Calls to warm up, and calls to estimate the number per block.
WARM_UP, PROBE = 200, 100
# Untimed calls before each block, to restore the caches after another block.
LEAD_IN = 10


class Call(NamedTuple):
    """A function and the arguments of the measured calls."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}

    def seconds(self, times: int) -> float:
        """Return the CPU time of `times` calls in this thread.

        Wall time would include other programs.
        """
        function, args, kwargs = self
        repetitions = itertools.repeat(None, times)
        if kwargs:
            start = time.thread_time()
            for _ in repetitions:
                function(*args, **kwargs)
            return time.thread_time() - start
        # A separate loop, because unpacking an empty mapping takes time.
        start = time.thread_time()
        for _ in repetitions:
            function(*args)
        return time.thread_time() - start


class Timing(NamedTuple):
    """The median of the rounds, in microseconds per call, and the total number of calls."""

    median: float
    calls: int


class Spread(NamedTuple):
    """The median, minimum and maximum of a number over several processes."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def measure(calls: Mapping[str, Call], rounds: int) -> dict[str, Timing]:
    """Time several calls in interleaved rounds.

    Each round times one block of every call, starting with a different one, so a slow second of
    the machine affects all calls alike.

    The garbage collector stays on, as in programs, so its work for the measured calls is included.
    Objects created before are frozen.

    Args:
        calls: the calls to time, by name.
        rounds: the number of blocks per call.
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
    """Warm up a call, and return how many calls fill a block."""
    call.seconds(WARM_UP)
    return max(1, round(BLOCK_SECONDS / (call.seconds(PROBE) / PROBE)))


# --------------------------------------------------------------------------------------------------
# The programs around a measurement


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options of all benchmarks."""
    arguments = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE too"
    )
    return arguments


def environment() -> dict[str, str | int]:
    """Return the versions and the machine, to store with the results."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "torch_threads": torch.get_num_threads(),
    }


def console() -> Console:
    """Return a console for the terminal, or for a pipe."""
    # In a pipe, rich assumes 80 columns, which would wrap the tables.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def table(title: str, *columns: str) -> Table:
    """Return a table with a column of names followed by columns of numbers."""
    first, *others = columns
    result = Table(title=title, title_justify="left", title_style="bold")
    # Wide numbers must not wrap the names.
    result.add_column(first, no_wrap=True)
    for column in others:
        result.add_column(column, justify="right")
    return result


class Bar(NamedTuple):
    """A measured number and the limit that it must not exceed."""

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
    """Write results and the environment to `file`, unless it is None."""
    if file is not None:
        file.write_text(json.dumps({"environment": environment(), **results}, indent=2) + "\n")
