"""Makes the virtual environment of `make`, and shows what is installed, with times and sizes.

    python tools/install.py FOLDER

pip shows a bar while it downloads, which is no use in a log, and nothing while it unpacks, which
takes most of the time. This writes lines, the same ones on a terminal and in a log. It runs before
anything is installed, so it needs nothing but Python.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = [f"--requirement={ROOT / 'requirements' / name}.txt" for name in ("torch", "dev")]
TORCHOP = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
# Without bytecode: Python makes it of what is imported, which is a third, and pip of everything, on
# one processor, which takes as long as to unpack it.
PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
PIP += ["--no-compile"]
SECONDS = 5.0  # until a line says how far it is
LARGE = 10.0  # megabytes of a file whose download is worth a line
LINES_OF_A_FAILURE = 30

_FILE = re.compile(r"(?:Downloading|Using cached) (\S+\.(?:whl|tar\.gz))(?: \(([\d.]+) (\w+)\))?")
_LOCAL_FILE = re.compile(r"Processing (\S+\.(?:whl|tar\.gz))")
_INSTALLING = "Installing collected packages: "
_PROBLEM = re.compile(r"ERROR|WARNING: Retrying")


def main() -> int:
    """Makes the environment; returns the exit code of what failed, or 0."""
    folder, start = Path(sys.argv[1]), time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {text}", flush=True)

    say(f"1 of 3: a virtual environment, with Python {'.'.join(map(str, sys.version_info[:3]))}")
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin" / "python"), *PIP]
    steps = {
        "2 of 3: PyTorch, and what the tests need, from requirements/": REQUIREMENTS,
        "3 of 3: torchop, as it stands in this folder; its C++ is compiled later": TORCHOP,
    }
    for title, arguments in steps.items():
        say(title)
        process = start_process([*pip, *arguments])
        said: list[str] = []
        with process:
            for text in progress(output(process, said), folder):
                say(f"  {text}")
        if (code := process.wait()) != 0:
            say(f"pip failed with exit code {code}. This is the end of what it said:")
            print("\n".join(said[-LINES_OF_A_FAILURE:]), flush=True)
            return code
    say(f"installed: {packages(folder)} packages, {megabytes(folder):,.0f} MB")
    return 0


def progress(lines: Iterator[str | None], folder: Path) -> Iterator[str]:
    """Says in a few lines what pip says in many, and how far it is where it says nothing.

    Args:
        lines: what pip says, and None every few seconds.
        folder: the environment into which it unpacks.
    """
    files = count = 0
    size = 0.0
    before = packages(folder)
    for line in lines:
        if line is None and count:
            done = min(packages(folder) - before, count)
            yield f"packages: {done} of {count} unpacked, {megabytes(folder):,.0f} MB"
        elif line is None:
            yield f"packages: {files} found, {size:,.0f} MB"
        elif _PROBLEM.match(line):
            yield line
        elif line.startswith(_INSTALLING):
            count = line.count(",") + 1
            yield f"packages: unpacking {count}, {size:,.0f} MB"
        elif found := _FILE.match(line) or _LOCAL_FILE.match(line):
            files += 1
            its_size = _size(*found.groups())
            size += its_size
            if its_size >= LARGE:
                yield f"{line.partition(' ')[0].lower()} {Path(found[1]).name}, {its_size:,.0f} MB"


def _size(file: str, number: str | None = None, unit: str = "MB") -> float:
    """The megabytes of a file: as pip says, or as it has on this machine."""
    if number is not None:
        return float(number) * {"GB": 1e3, "MB": 1, "kB": 1e-3}.get(unit, 1e-6)
    path = Path(file)
    return path.stat().st_size / 1e6 if path.is_file() else 0.0


def start_process(command: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a command, whose lines can be read when they are written."""
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen[str], said: list[str]) -> Iterator[str | None]:
    """Yields the lines of a process, which go into `said` too, and None every few seconds."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    shown = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=max(0.0, shown + SECONDS - time.monotonic()))
        except queue.Empty:
            shown = time.monotonic()
            yield None
            continue
        if line is None:
            return
        said.append(line)
        yield line


def packages(folder: Path) -> int:
    """How many packages an environment has."""
    return len(list(folder.glob("lib/python*/site-packages/*.dist-info")))


def megabytes(folder: Path) -> float:
    """How large the files in a folder are."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # pip has removed it meanwhile
                continue
    return size / 1e6


if __name__ == "__main__":
    sys.exit(main())
