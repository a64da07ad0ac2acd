"""The command line of torchop."""

from __future__ import annotations

import click
import rich  # noqa: F401  # so that it is missing here, where __main__ expects that

import torchop
from torchop.cli.accelerate import accelerate
from torchop.cli.build import build
from torchop.cli.doctor import doctor
from torchop.cli.record import record


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(torchop.__version__, prog_name="torchop")
def main() -> None:
    """Measures what native calls would save, and builds and checks the native call path."""


for command in (accelerate, build, doctor, record):
    main.add_command(command)
