"""Time, compare and store measurements. All benchmarks use this module.

A benchmark consists of *parts*. A part is a function that runs in a separate process and returns
*tables*, with a number for each row and variant (column). This module runs each part in several
processes, prints the medians, checks that the numbers do not exceed their limits, and writes the
numbers of all processes to `results/<name>.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).with_name("results")
# Calls are timed in blocks of this length. Reading the clock takes 0.3 us, which is not noticeable
# in such a long block. The blocks are short enough that another program on the machine slows down
# all variants equally.
BLOCK_SECONDS = 0.002
WARM_UP_CALLS, WARM_UP_SECONDS = 300, 0.1

# Matches a list of numbers in JSON. Results files have each list on one line.
_LIST = re.compile(r"\[[^\[\]{}]*\]")
# The numbers that one process measured: `tables[table][row][variant]`.
Tables = dict[str, dict[str, dict[str, float]]]
Settings = Mapping[str, int]


# --------------------------------------------------------------------------------------------------
# Timing


class Variant(NamedTuple):
    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def measure(variants: Mapping[str, Variant], rounds: int) -> dict[str, float]:
    """Return the median time of one call of each variant, in microseconds.

    In each of the `rounds`, one block of calls of each variant is timed, and each round starts with
    a different variant. The CPU time of this thread is measured, because elapsed time would also
    include time that other programs use. The garbage collector stays enabled, as in real programs,
    but objects that exist before the measurement are frozen.
    """
    timers = {name: _Timer(variant) for name, variant in variants.items()}
    gc.collect()
    gc.freeze()
    names = list(timers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timers[name].block())
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


class _Timer:
    def __init__(self, variant: Variant) -> None:
        from torch.utils.benchmark import Timer  # not at the top: registration.py times imports

        self.context = variant.context
        call = "function(*args, **kwargs)" if variant.kwargs else "function(*args)"
        names = {**variant._asdict(), "gc": gc}
        # timeit disables the garbage collector, so enable it again in the set-up code.
        self.timer = Timer(call, setup="gc.enable()", globals=names, timer=time.thread_time)
        with self.context():
            seconds = self.timer.timeit(5).mean
            calls = min(WARM_UP_CALLS, max(5, round(WARM_UP_SECONDS / seconds)))
            self.calls = max(1, round(BLOCK_SECONDS / self.timer.timeit(calls).mean))

    def block(self) -> float:
        with self.context():
            return self.timer.timeit(self.calls).mean


# --------------------------------------------------------------------------------------------------
# Benchmarks


class Limit(NamedTuple):
    """An upper limit for a number, or for the ratio of two numbers.

    If `base` is a variant, the limit `most` applies to the ratio of `variant` to `base`, or to
    their difference if `difference` is true. If `base` is None, it applies to the number itself. If
    `base` is in a different row, `base_row` names that row.
    """

    table: str
    row: str
    variant: str
    most: float
    base: str | None = None
    base_row: str | None = None
    difference: bool = False

    def value(self, runs: Sequence[Tables]) -> float | None:
        def numbers(row: str, variant: str) -> list[float] | None:
            values = [run[self.table].get(row, {}).get(variant) for run in runs]
            return None if None in values else values  # type: ignore[return-value]

        values = numbers(self.row, self.variant)
        if values is None or self.base is None:
            return None if values is None else statistics.median(values)
        bases = numbers(self.base_row or self.row, self.base)
        return None if bases is None else compare(values, bases, difference=self.difference)

    def describe(self, unit: str) -> tuple[str, str]:
        name = f"{self.row}: {self.variant}"
        if self.base is not None:
            other = f"{self.base_row}: {self.base}" if self.base_row else self.base
            name += f" {'-' if self.difference else '/'} {other}"
        return name, f" {unit}" if self.base is None or self.difference else "x"


def compare(values: Sequence[float], bases: Sequence[float], *, difference: bool = False) -> float:
    """Return the median ratio (or difference) of pairs of numbers.

    Each pair was measured in the same process, because some processes are slower than others.
    """
    pairs = zip(values, bases, strict=True)
    return statistics.median(v - b if difference else v / b for v, b in pairs)


# Without the first variable, the first process would measure calls through the dispatcher while it
# compiles the extension. Without the second, Inductor's worker processes would disturb the
# measurement.
ENVIRONMENT = {"TORCHOP_NATIVE": "require", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class Benchmark:
    """The definition of a benchmark.

    Each function in `parts` runs in a separate process, measures, and returns tables. `units` has
    the unit of each table. `settings` has the names and defaults of the command-line options, all
    of which are numbers. Each benchmark has the option `processes`, the number of processes to run
    for each part. The numbers must not exceed the upper `limits`.
    """

    name: str
    units: Mapping[str, str]
    parts: Mapping[str, Callable[[Settings], Tables]]
    settings: Settings
    limits: Sequence[Limit] = ()
    environment: Mapping[str, str] = field(default_factory=ENVIRONMENT.copy)


def main(benchmark: Benchmark) -> int:
    """Run a benchmark as a program. Return 1 if a number exceeds its limit."""
    description = sys.modules["__main__"].__doc__ or ""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    for name, default in benchmark.settings.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    parser.add_argument("--part", choices=benchmark.parts, help="run one part, and print JSON")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=RESULTS / f"{benchmark.name}.json"
    )
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in benchmark.settings}
    if options.part is not None:
        print(json.dumps(run_here(benchmark, options.part, settings)))
        return 0
    found = environment()  # call it now, because the user may commit something during the run
    runs = collect(benchmark, settings)
    write(options.json, benchmark.units, runs, found)
    return show(benchmark, runs, found)


def collect(benchmark: Benchmark, settings: Settings) -> list[Tables]:
    runs = []
    for _ in range(settings["processes"]):
        tables: Tables = {}
        for part in benchmark.parts:
            for table, rows in run_part(benchmark, part, settings).items():
                for row, numbers in rows.items():
                    tables.setdefault(table, {}).setdefault(row, {}).update(numbers)
        runs.append(tables)
    return runs


def run_part(benchmark: Benchmark, part: str, settings: Settings) -> Tables:
    program = str(Path(__file__).with_name(f"{benchmark.name}.py"))
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    # Allow Python to write bytecode, as in an installed package. Otherwise, each process would
    # compile torchop's sources.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        [sys.executable, program, "--part", part, *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**variables, **benchmark.environment},
    )
    tables: Tables = json.loads(process.stdout)
    return tables


def run_here(benchmark: Benchmark, part: str, settings: Settings) -> Tables:
    """Run a part in this process. PyTorch uses only one thread."""
    torch.set_num_threads(1)
    return benchmark.parts[part](settings)


# --------------------------------------------------------------------------------------------------
# Results


def environment() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "os": platform.platform(),
        "device": device,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "commit": _commit(),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# The files that can influence the numbers, as Git pathspecs.
MEASURED = (":/src", ":/benchmarks", ":/examples", ":(top,exclude)benchmarks/results")


def _commit() -> str:
    """Return the current commit, with the suffix `-dirty` if measured code has changed since."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=folder, check=False, capture_output=True, text=True
        )

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changes = git("diff", "HEAD", "--", *MEASURED)
    except OSError:
        return "unknown"
    if commit.returncode or changes.returncode:
        return "unknown"
    return commit.stdout.strip() + ("-dirty" if changes.stdout else "")


def write(
    file: Path, units: Mapping[str, str], runs: Sequence[Tables], found: Mapping[str, Any]
) -> None:
    tables = {
        table: {
            "unit": units[table],
            "rows": {
                row: {variant: [_short(run[table][row][variant]) for run in runs] for variant in of}
                for row, of in rows.items()
            },
        }
        for table, rows in runs[0].items()
    }
    text = json.dumps({"environment": found, "tables": tables}, indent=2)
    file.write_text(
        _LIST.sub(lambda found: "".join(found[0].split()).replace(",", ", "), text) + "\n"
    )


def _short(number: float) -> float:
    return float(f"{number:.4g}")


class Result:
    def __init__(self, name: str) -> None:
        text = (RESULTS / f"{name}.json").read_text(encoding="utf-8")
        stored = json.loads(text)
        self.environment: dict[str, Any] = stored["environment"]
        self.tables: dict[str, Any] = stored["tables"]

    def values(self, table: str, row: str) -> dict[str, float]:
        found = self.tables[table]["rows"][row]
        return {variant: statistics.median(values) for variant, values in found.items()}

    def compare(
        self, table: str, row: str, variant: str, base: str, *, difference: bool = False
    ) -> float:
        """Return the median ratio (or difference) of two variants in a row."""
        found = self.tables[table]["rows"][row]
        return compare(found[variant], found[base], difference=difference)


def show(benchmark: Benchmark, runs: Sequence[Tables], found: Mapping[str, Any]) -> int:
    """Print the medians, and compare them with the limits. Return 1 if one exceeds its limit."""
    shown = console()
    shown.print(f"torch {found['torch']}, Python {found['python']}, {found['cpu']}")
    for title, rows in runs[0].items():
        variants = list(dict.fromkeys(variant for of in rows.values() for variant in of))
        grid = table(f"{title} ({benchmark.units[title]})", "", *variants)
        for row in rows:
            grid.add_row(row, *_cells(row, variants, [run[title] for run in runs]))
        shown.print(grid)
    failed = 0
    for limit in benchmark.limits:
        value = limit.value(runs)
        if value is None:
            continue
        passed = value <= limit.most
        failed += not passed
        name, unit = limit.describe(benchmark.units[limit.table])
        shown.print(
            f"{'pass' if passed else 'FAIL'}  {name} is {value:.4g}{unit}, at most "
            f"{limit.most:.4g}{unit}",
            style="green" if passed else "bold red",
        )
    return 1 if failed else 0


def _cells(row: str, variants: Sequence[str], runs: Sequence[Any]) -> Iterator[str]:
    values = {name: [run[row][name] for run in runs] for name in runs[0][row]}
    medians = {name: statistics.median(of) for name, of in values.items()}
    first = next(iter(medians))
    for name in variants:
        if name not in medians:
            yield "-"
        elif name == first or not all(values[first]):
            yield f"{medians[name]:.4g}"
        else:
            yield f"{medians[name]:.4g} ({compare(values[name], values[first]):.2f}x)"


def console() -> Any:
    """Return a rich console that also works if the output is piped."""
    from rich.console import Console

    # If the output is not a terminal, rich would assume 80 columns, which is too narrow for the
    # tables.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def table(title: str, *columns: str) -> Any:
    from rich.table import Table

    first, *others = columns
    result = Table(title=title, title_justify="left", title_style="bold")
    result.add_column(first, no_wrap=True)
    for column in others:
        result.add_column(column, justify="right")
    return result
