"""`python -m torchop explain`: what the dispatcher, or a native call, does with a call."""

from __future__ import annotations

import click

import torchop
from torchop.cli.calls import CALL, calls_of, described, with_gradients
from torchop.cli.measure import first_line
from torchop.cli.selection import select, selecting


@click.command()
@selecting
@CALL
@click.option("--grad", is_flag=True, help="Let floating-point tensors require gradients.")
def explain(names: tuple[str, ...], imports: tuple[str, ...], text: str | None, grad: bool) -> None:
    """Says which kernels a call runs, and whether it is native.

    The calls are the registered examples, or the one that --call gives. The operators do not run.
    """
    for op in select(names, imports).operators:
        for call in calls_of(op, text):
            args, kwargs = with_gradients(call) if grad else call
            try:
                explanation = torchop.explain(op, *args, **kwargs)
            except Exception as error:
                raise click.ClickException(
                    f"{op}{described((args, kwargs))}: {first_line(error)}"
                ) from None
            click.echo(f"{described((args, kwargs))}\n{explanation}\n")
