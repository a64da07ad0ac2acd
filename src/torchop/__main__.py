"""`python -m torchop`: the command line, if what it needs is installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; exits with 2 if what `torchop[cli]` adds is not installed."""
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
    cli.main(prog_name="python -m torchop")


if __name__ == "__main__":
    main()
