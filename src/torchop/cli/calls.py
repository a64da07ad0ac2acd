"""The calls that a command makes or explains: registered examples, or one from the command line."""

from __future__ import annotations

from typing import Any

import click
import torch

from torchop._errors import MissingRuleError
from torchop._rules.user.examples import make_examples
from torchop.cli.measure import first_line
from torchop.testing.probes import mapped

Call = tuple[tuple[Any, ...], dict[str, Any]]

CALL = click.option(
    "--call",
    "text",
    metavar="ARGUMENTS",
    help="The arguments in Python, such as 'torch.ones(3), dim=0'. The default are the registered "
    "examples.",
)


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
    args, kwargs = call
    parts = [_described(value) for value in args]
    parts += [f"{name}={_described(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        grad = ", requires_grad" if value.requires_grad else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{[*value.shape]} on {value.device}{grad}"
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return f"[{', '.join(map(_described, value))}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
