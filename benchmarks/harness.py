"""The harness of all benchmarks: time variants in turn, compare them, and store the numbers.

A benchmark declares *parts*. Each part runs in a separate process and returns *tables*: a number
for each variant of each row. The harness runs all parts in several processes, prints the medians,
checks the limits, and writes the numbers of every process to `results/<name>.json`.
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
# Reading the clock takes 0.3 us. Blocks of this length hide that, and are short enough for all
# variants to run within the same disturbance of a busy machine.
BLOCK_SECONDS = 0.002
WARM_UP_CALLS, WARM_UP_SECONDS = 300, 0.1

# A list of numbers in JSON. Results files have one list per line.
_LIST = re.compile(r"\[[^\[\]{}]*\]")
# The numbers of one process: by table, row and variant.
Tables = dict[str, dict[str, dict[str, float]]]
Settings = Mapping[str, int]


# --------------------------------------------------------------------------------------------------
# Timing


class Variant(NamedTuple):
    """A call to time, and the context that it runs in."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def measure(variants: Mapping[str, Variant], rounds: int) -> dict[str, float]:
    """Time variants in turn.

    Every round times one block of calls to each variant, and starts with another variant. CPU time
    of this thread is measured, because elapsed time would include other programs. The garbage
    collector is enabled, as it is in programs, but skips all objects that exist already.

    Args:
        variants: the calls, by name.
        rounds: the number of blocks of each variant.

    Returns:
        The median time of one call of each variant, in microseconds.
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
    """Time blocks of calls to one variant."""

    def __init__(self, variant: Variant) -> None:
        from torch.utils.benchmark import Timer  # imported late: `registration` times imports

        self.context = variant.context
        call = "function(*args, **kwargs)" if variant.kwargs else "function(*args)"
        names = {**variant._asdict(), "gc": gc}
        # timeit disables the collector; the set-up enables it again.
        self.timer = Timer(call, setup="gc.enable()", globals=names, timer=time.thread_time)
        with self.context():
            seconds = self.timer.timeit(5).mean
            calls = min(WARM_UP_CALLS, max(5, round(WARM_UP_SECONDS / seconds)))
            self.calls = max(1, round(BLOCK_SECONDS / self.timer.timeit(calls).mean))

    def block(self) -> float:
        """Return the seconds that one call takes, on average in a block."""
        with self.context():
            return self.timer.timeit(self.calls).mean


# --------------------------------------------------------------------------------------------------
# Benchmarks


class Limit(NamedTuple):
    """The highest number that a benchmark accepts.

    Attributes:
        table, row, variant: the number.
        most: the limit of the number, or of its comparison with `base`.
        base: the variant of the same row and process to compare with.
        base_row: the row of `base`, if it is another one.
        difference: subtract `base` instead of dividing by it.
    """

    table: str
    row: str
    variant: str
    most: float
    base: str | None = None
    base_row: str | None = None
    difference: bool = False

    def value(self, runs: Sequence[Tables]) -> float | None:
        """Return the median of all processes, or None if this machine did not measure it."""

        def numbers(row: str, variant: str) -> list[float] | None:
            values = [run[self.table].get(row, {}).get(variant) for run in runs]
            return None if None in values else values  # type: ignore[return-value]

        values = numbers(self.row, self.variant)
        if values is None or self.base is None:
            return None if values is None else statistics.median(values)
        bases = numbers(self.base_row or self.row, self.base)
        return None if bases is None else compare(values, bases, difference=self.difference)

    def describe(self, unit: str) -> tuple[str, str]:
        """Return the number's name and unit."""
        name = f"{self.row}: {self.variant}"
        if self.base is not None:
            other = f"{self.base_row}: {self.base}" if self.base_row else self.base
            name += f" {'-' if self.difference else '/'} {other}"
        return name, f" {unit}" if self.base is None or self.difference else "x"


def compare(values: Sequence[float], bases: Sequence[float], *, difference: bool = False) -> float:
    """Return the median ratio or difference. Pairs are from one process, which set the speed."""
    pairs = zip(values, bases, strict=True)
    return statistics.median(v - b if difference else v / b for v, b in pairs)


# Without the first, the first process would measure the dispatcher while the extension compiles.
# Without the second, Inductor's worker processes would disturb the measurement.
ENVIRONMENT = {"TORCHOP_NATIVE": "require", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark measures.

    Attributes:
        name: the name of its program, and of its file in `results`.
        units: the unit of each table.
        parts: functions that return tables. Each runs in a separate process.
        settings: options of the command line with their defaults, all of them numbers. Every
            benchmark has `processes`, the number of processes for each part.
        limits: the numbers that must not grow.
        environment: environment variables of the processes.
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
    found = environment()  # before the run, so that a commit made during the run is not recorded
    runs = collect(benchmark, settings)
    write(options.json, benchmark.units, runs, found)
    return show(benchmark, runs, found)


def collect(benchmark: Benchmark, settings: Settings) -> list[Tables]:
    """Run all parts in turn, as often as `processes` says."""
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
    """Run a part in a new process."""
    program = str(Path(__file__).with_name(f"{benchmark.name}.py"))
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    # Installed packages have bytecode, so imports must not compile sources.
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
    """Run a part in this process, with one thread of PyTorch."""
    torch.set_num_threads(1)
    return benchmark.parts[part](settings)


# --------------------------------------------------------------------------------------------------
# Results


def environment() -> dict[str, Any]:
    """Describe the machine, the releases and the commit of a measurement."""
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


# Changes of other files, such as results and pages, cannot change the numbers.
MEASURED = (":/src", ":/benchmarks", ":/examples", ":(top,exclude)benchmarks/results")


def _commit() -> str:
    """Return the commit of the working tree, with `-dirty` if the measured code differs from it."""

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
    """Write the numbers of every process, in the order of the processes."""
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
    """Stored numbers of one benchmark."""

    def __init__(self, name: str) -> None:
        text = (RESULTS / f"{name}.json").read_text(encoding="utf-8")
        stored = json.loads(text)
        self.environment: dict[str, Any] = stored["environment"]
        self.tables: dict[str, Any] = stored["tables"]

    def values(self, table: str, row: str) -> dict[str, float]:
        """Return the median of each variant."""
        found = self.tables[table]["rows"][row]
        return {variant: statistics.median(values) for variant, values in found.items()}

    def compare(
        self, table: str, row: str, variant: str, base: str, *, difference: bool = False
    ) -> float:
        """Return the median ratio or difference of two variants."""
        found = self.tables[table]["rows"][row]
        return compare(found[variant], found[base], difference=difference)


def show(benchmark: Benchmark, runs: Sequence[Tables], found: Mapping[str, Any]) -> int:
    """Print the medians and the limits. Return 1 if a number exceeds its limit."""
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
    """Yield the median of each variant, and its ratio to the first variant of the row."""
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
    """Return a rich console, also for pipes."""
    from rich.console import Console

    # Without a terminal, rich assumes 80 columns and breaks the tables.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def table(title: str, *columns: str) -> Any:
    """Return a rich table with names in the first column and numbers in the others."""
    from rich.table import Table

    first, *others = columns
    result = Table(title=title, title_justify="left", title_style="bold")
    result.add_column(first, no_wrap=True)
    for column in others:
        result.add_column(column, justify="right")
    return result
