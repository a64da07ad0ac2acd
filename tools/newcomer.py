"""What a newcomer sees in which second, from a fresh clone to a first operator of one's own.

    python tools/newcomer.py [--with-tests]

Clones this repository, as it is committed, into a folder that is removed in the end, and runs there
what README.md shows: the commands of "Try it", and the program of "Quick start". Every cache is
empty. Each command has a terminal, and what is on it is printed with the seconds since the start.
`make test` takes several times as long as all else, so it runs only if it is asked for.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import selectors
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COLUMNS = 120
_PAUSE = 0.2  # seconds until a line that is not finished is shown
# What moves the cursor or colours text, and the signs of a spinner.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\u2800-\u28ff]")


class Watched(NamedTuple):
    """A command that has ended."""

    code: int
    seconds: float
    silence: float  # the longest time in which nothing new was on the screen, in seconds
    before_silence: str  # what was there


def commands(readme: str) -> list[str]:
    """The commands that the section "Try it" shows; empty if there is no such section."""
    return _fence(readme, "Try it", "console").splitlines()


def first_program(readme: str) -> str:
    """The program with which "Quick start" begins."""
    return _fence(readme, "Quick start", "python")


def _fence(readme: str, section: str, language: str) -> str:
    pattern = rf"^## {section}\n((?!^## ).*\n)*?```{language}\n(?P<text>(?:(?!```).*\n)*)```"
    found = re.search(pattern, readme, re.MULTILINE)
    return "" if found is None else found["text"]


def watch(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Watched:
    """Runs a command on a terminal, and prints what is on that, with the seconds."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    start = last = time.monotonic()
    silence, before_silence, shown = 0.0, "", f"$ {' '.join(command)}"
    print(f"{0:7.1f}  {shown}", flush=True)
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=writer, stdout=writer, stderr=writer
    )
    os.close(writer)
    for line in _changes(reader):
        now = time.monotonic()
        if now - last > silence:
            silence, before_silence = now - last, shown
        last, shown = now, line
        print(f"{now - start:7.1f}  {line}", flush=True)
    os.close(reader)
    return Watched(process.wait(), time.monotonic() - start, silence, before_silence)


def _changes(reader: int) -> Iterator[str]:
    """Yields each new text on the terminal; of one that grows, what is there at a pause."""
    shown, rest = "", ""
    is_open = True
    # `select.select` takes no descriptor above 1,023.
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while is_open:
            ready = selector.select(_PAUSE)
            if ready:
                try:
                    block = os.read(reader, 1 << 16)
                except OSError:  # all processes that had the terminal have ended
                    block = b""
                is_open = block != b""
                rest += block.decode("utf-8", "replace")
            *lines, rest = re.split(r"[\r\n]+", rest)
            if rest and not (ready and is_open):
                lines.append(rest)
            for line in lines:
                text = _CONTROL.sub("", line).strip()
                if text and text != shown:
                    shown = text
                    yield text


def main() -> int:
    """Runs what the README shows; returns the exit code of what failed, or 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--with-tests", action="store_true", help="run the tests too")
    with_tests = parser.parse_args().with_tests
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder, clone = Path(name), Path(name, "torchop")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        readme = (clone / "README.md").read_text(encoding="utf-8")
        program = folder / "first.py"
        program.write_text(first_program(readme), encoding="utf-8")
        demo, test = commands(readme)
        python = str(clone / ".venv" / "bin" / "python")
        # A second time, as the demo takes seconds then.
        steps = [demo.split(), demo.split(), [python, str(program)]]
        if with_tests:
            steps.append(test.split())
        ended = {}
        for number, step in enumerate(steps, 1):
            print(f"\n{number} of {len(steps)}")
            ended[number] = watch(step, clone, _environment(folder))
            if ended[number].code != 0:
                break
    print()
    for number, watched in ended.items():
        print(
            f"{' '.join(steps[number - 1])}: exit code {watched.code}, {watched.seconds:.0f} s; "
            f"the longest silence was {watched.silence:.0f} s, after: {watched.before_silence}"
        )
    return ended[number].code


def _environment(folder: Path) -> dict[str, str]:
    """The environment of a new user: no environment of Python is active, and caches are empty."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHOP_", "TORCHINDUCTOR_", "MAKE"))
        and name not in ("CI", "MFLAGS", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    caches = {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    return {**environment, **caches, "TERM": "xterm"}


if __name__ == "__main__":
    sys.exit(main())
