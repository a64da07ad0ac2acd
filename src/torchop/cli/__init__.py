"""The command line of torchop."""

from __future__ import annotations

import click
import rich  # noqa: F401  # raises ModuleNotFoundError here, where __main__ catches it

import torchop
from torchop._native.extension import api
from torchop.cli.accelerate import accelerate
from torchop.cli.calls import bench, explain
from torchop.cli.catalogue import catalogue
from torchop.cli.check import check
from torchop.cli.native import build, doctor
from torchop.cli.record import record
from torchop.cli.schema import schema


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(torchop.__version__, prog_name="torchop")
def main() -> None:
    """Tools for PyTorch operators that are defined in Python.

    Check, list and measure operators, and compile the C++ extension that speeds up calls to them.
    """
    try:
        api.mode()
    except ValueError as error:  # the environment variable TORCHOP_NATIVE is invalid
        raise click.UsageError(str(error)) from None


COMMANDS = (
    accelerate,
    bench,
    build,
    catalogue,
    check,
    doctor,
    explain,
    record,
    schema,
)
for command in COMMANDS:
    main.add_command(command)
