"""`python -m torchop`: run the command line, or report a missing dependency."""

from __future__ import annotations

import faulthandler
import os
import sys

from torchop import __version__


def main() -> None:
    """Run the command line. Exit with 2 if the extra `cli` is not installed.

    If an OSError is raised, for example because the disk is full, print it as a single line without
    a traceback.
    """
    if not faulthandler.is_enabled():  # prints a traceback if an imported module crashes
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
        # Redirect standard output to the null device. Otherwise, Python would flush the buffered
        # output at exit and raise the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"torchop: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
