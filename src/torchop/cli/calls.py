"""The calls that a command makes or explains: registered examples, or one from the command line."""

from __future__ import annotations

import click
import torch

import torchop
from torchop import MissingRuleError
from torchop._inspect import call_record
from torchop._rules.user.examples import make_examples
from torchop.cli.child_process import first_line
from torchop.cli.measure import Call
from torchop.cli.selection import Selection, selecting
from torchop.testing.probes import mapped

CALL = click.option(
    "--call",
    "text",
    metavar="ARGUMENTS",
    help="The arguments in Python, such as 'torch.ones(3), dim=0'. The default are the registered "
    "examples.",
)


@click.command()
@selecting
@CALL
@click.option("--grad", is_flag=True, help="Let floating-point tensors require gradients.")
def explain(selection: Selection, text: str | None, grad: bool) -> None:
    """Says which kernels a call runs, and whether it is native.

    The calls are the registered examples, or the one that --call gives. The operators do not run.
    """
    for op in selection.operators:
        for call in calls_of(op, text):
            args, kwargs = with_gradients(call) if grad else call
            shown = described((args, kwargs))
            try:
                explanation = torchop.explain(op, *args, **kwargs)
            except Exception as error:
                raise click.ClickException(f"{op}{shown}: {first_line(error)}") from None
            click.echo(f"{shown}\n{explanation}\n")


def calls_of(op: str, text: str | None) -> list[Call]:
    """The calls of an operator.

    Raises:
        click.ClickException: they cannot be had.
    """
    if text is not None:
        return [_evaluated(text)]
    try:
        return make_examples(op)
    except MissingRuleError:
        raise click.ClickException(
            f"{op} has no examples; pass the arguments: --call 'torch.ones(3)'"
        ) from None
    except Exception as error:
        raise click.ClickException(f"the examples of {op}: {first_line(error)}") from None


def _evaluated(text: str) -> Call:
    # As `python -c` does with what stands on its command line.
    names = {"torch": torch, "capture": lambda *args, **kwargs: (args, kwargs)}
    try:
        call: Call = eval(f"capture({text})", names)
    except Exception as error:
        raise click.ClickException(f"--call {text!r}: {first_line(error)}") from None
    return call


def with_gradients(call: Call) -> Call:
    """The call with floating-point tensors that require grad."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()
        can_have_one = detached.is_floating_point() or detached.is_complex()
        return detached.requires_grad_() if can_have_one else detached

    changed: Call = mapped(call, change)
    return changed


def described(call: Call) -> str:
    """The arguments of a call in one line: tensors by dtype and shape."""
    return call_record.described(call_record.record_of(*call))
