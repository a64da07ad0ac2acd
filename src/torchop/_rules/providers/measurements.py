"""Read and write tables of measurements: the times of kernels for given tensor sizes.

A table is a JSON file that contains no code. It only selects among the registered kernels and their
configs, so a wrong table may make calls slow, but never makes their results wrong.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torchop._errors import short_text

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
Sizes: TypeAlias = "tuple[tuple[int, int | None], ...]"


class TableError(Exception):
    """Raised if a file cannot be read, or is not a table of measurements."""


class NewerTableError(TableError):
    """Raised if a newer version of torchop wrote the table, so it must not be overwritten."""


class Measured(NamedTuple):
    """The time of one kernel: the median of several calls, and its 95 % confidence interval.

    `config` is the kernel's tunable arguments, such as tile sizes. `digest` identifies the kernel's
    source code, so that measurements of an older version are not used.
    """

    provider: str
    config: Mapping[str, Any]
    digest: str
    microseconds: float
    interval: tuple[float, float]

    @property
    def label(self) -> str:
        return " ".join([self.provider, *(f"{k}={v!r}" for k, v in self.config.items())])

    @property
    def times(self) -> tuple[str, str]:
        low, high = self.interval
        return f"{self.microseconds:.2f}", f"{low:.2f} to {high:.2f}"


class Measurement(NamedTuple):
    """The times of all kernels for calls with the same device, dtypes and ranges of sizes.

    Attributes:
        device: the name of the device, and for a CPU also the number of threads.
        arguments: the dtypes and plain values of the arguments as text, such as `float32[*, *], 1`.
            Each `*` stands for the size of a tensor dimension.
        sizes: for each `*` in `arguments`, the minimum and the maximum size. None means no maximum.
        kernels: the measured kernels, fastest first.
    """

    op: str
    device: str
    torch: str
    arguments: str
    sizes: Sizes
    kernels: tuple[Measured, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:5]

    @property
    def call(self) -> str:
        """`arguments` with a range of sizes in place of each `*`, for display."""
        parts = self.arguments.split("*")
        spelled = map(_spelled_range, self.sizes)
        return parts[0] + "".join(a + b for a, b in zip(spelled, parts[1:], strict=False))

    def fits(self, sizes: Sequence[int]) -> bool:
        """Return whether all sizes are in the measured ranges.

        If a size is symbolic, this adds a guard to the compiled graph.
        """
        return all(
            size >= low and (high is None or size <= high)
            for size, (low, high) in zip(sizes, self.sizes, strict=True)
        )


def _spelled_range(limits: tuple[int, int | None]) -> str:
    low, high = limits
    return f"{low}" if low == high else f"{low}..{'' if high is None else high}"


def read(path: Path) -> list[Measurement]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        if isinstance(version, int) and version > FORMAT:
            raise NewerTableError(
                f"{path} was written by a newer torchop ({short_text(content.get('torchop'))})"
            )
        return list(map(_parsed, content["measurements"]))
    except OSError as error:
        raise TableError(f"{path} cannot be read: {error.strerror}") from None
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        problem = short_text(f"{type(error).__name__}: {error}")
        raise TableError(f"{path} is not a table of measurements ({problem})") from None


def _parsed(item: Any) -> Measurement:
    names = [_checked(item[name], str) for name in ("op", "device", "torch", "arguments")]
    sizes = tuple(
        (_checked(a, int), b if b is None else _checked(b, int)) for a, b in item["sizes"]
    )
    if names[3].count("*") != len(sizes):
        raise ValueError(f"{names[3]!r} does not have {len(sizes)} sizes")
    kernels = [
        Measured(
            _checked(kernel["provider"], str),
            _checked(kernel["config"], dict),
            _checked(kernel["digest"], str),
            float(kernel["microseconds"]),
            tuple(map(float, kernel["interval"])),  # type: ignore[arg-type]  # checked below
        )
        for kernel in item["kernels"]
    ]
    if not kernels or any(len(kernel.interval) != 2 for kernel in kernels):
        raise ValueError("a measurement has no kernels, or an interval does not have two limits")
    times = [time for kernel in kernels for time in (kernel.microseconds, *kernel.interval)]
    if not all(math.isfinite(time) and time >= 0 for time in times):
        raise ValueError("a time is negative or not finite")
    return Measurement(names[0], names[1], names[2], names[3], sizes, tuple(kernels))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a table of measurements, so that no other process can update it in a `with` block.

    This locks the folder, because a lock on the table's file would be lost when `write` replaces
    the file, and a separate lock file would be left behind in the folder.
    """
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            descriptor = os.open(path.absolute().parent, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            # Locking is best effort, because some network file systems do not support locks.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    version = json.dumps({"format": FORMAT, "torchop": sys.modules["torchop"].__version__})
    listed = ",\n".join(
        # Put each kernel on a separate line, which `json.dumps` alone cannot do.
        f"{json.dumps({**m._asdict(), 'kernels': 0})[:-2]}[\n  {_lines(m.kernels)}]}}"
        for m in sorted(measurements, key=lambda m: (m.key[:4], [low for low, _ in m.sizes]))
    )
    text = f'{version[:-1]}, "measurements": [\n{listed}\n]}}'
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(name, 0o644)  # otherwise, only the current user could read the file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _lines(kernels: Iterable[Measured]) -> str:
    return ",\n  ".join(json.dumps(kernel._asdict()) for kernel in kernels)


def merged(*tables: Iterable[Measurement]) -> list[Measurement]:
    return list({m.key: m for table in tables for m in table}.values())
