"""`python -m torchop`: the command line, if what it needs is installed."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command line; exits with 2 if what `torchop[cli]` adds is not installed.

    A file that cannot be read or written, such as a standard output on a full disk, is no fault of
    the program, so it ends with a line that says so, and the exit code 1.
    """
    try:
        from torchop import cli  # click and rich may be missing
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(
            f"torchop: the command line needs {error.name}: pip install click rich",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        cli.main(prog_name="python -m torchop")
    except OSError as error:
        # What is still buffered would fail again when Python flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"torchop: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
