"""`python -m torchop`: the command line, if what it needs is installed."""

from __future__ import annotations

import faulthandler
import os
import sys

from torchop import __version__


def main() -> None:
    """Runs the command line; exits with 2 if what the extra `cli` adds is not installed.

    A file that cannot be read or written, such as a standard output on a full disk, is no fault of
    the program, so it ends with a line that says so, and the exit code 1.
    """
    if not faulthandler.is_enabled():  # says where a module was that crashes while it is imported
        faulthandler.enable(sys.__stderr__ or sys.stderr)
    try:
        from torchop import cli  # click and rich may be missing
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        if sys.argv[1:] == ["--version"]:
            print(f"torchop, version {__version__}")
            return
        from torchop.testing._extras import installing  # only for this message

        print(f"torchop: the command line needs {error.name}: {installing('cli')}", file=sys.stderr)
        sys.exit(2)
    try:
        cli.main()
    except OSError as error:
        # What is still buffered would fail again when Python flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"torchop: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
