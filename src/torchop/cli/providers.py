"""`python -m torchop providers`: the kernels of operators, whose they are, and which can run."""

from __future__ import annotations

import json

import click

import torchop
from torchop._inspect.providers import Provided
from torchop.cli.selection import Selection, print_table, selecting, short_place


@click.command()
@selecting
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def providers(selection: Selection, as_json: bool) -> None:
    """Lists the providers of operators that have several kernels for a device.

    Each row says whether the provider can run here, and its place in the order that calls follow,
    from TORCHOP_PRIORITY, torchop.set_priority or the author of the operator.
    """
    kernels = torchop.providers(*selection.operators)
    if as_json:
        click.echo(json.dumps([kernel._asdict() for kernel in kernels], indent=1))
        return
    if not kernels:
        click.echo("No operator has more than one provider.")
        return
    columns = ("operator", "order", "provider", "device types", "can run", "where")
    print_table(columns, map(_cells, kernels))


def _cells(kernel: Provided) -> tuple[str, ...]:
    return (
        kernel.op,
        "" if kernel.rank is None else str(kernel.rank),
        kernel.provider,
        ", ".join(device or "every device" for device in kernel.device_types),
        "yes" if kernel.supported else f"no: {kernel.reason}",
        short_place(kernel.where),
    )
