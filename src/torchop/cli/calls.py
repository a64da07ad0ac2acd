"""`python -m torchop explain` and `bench`: which way a call takes, what it costs, and where.

The calls are registered examples, or one from the command line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import click
import torch

import torchop
from torchop import MissingRuleError, NativeUnavailableError
from torchop._accelerate.accelerate import aligned
from torchop._inspect import call_record
from torchop._rules.user.examples import make_examples, operator_of_examples
from torchop.cli.child_process import answers_of, first_line, preload
from torchop.cli.measure import Call
from torchop.cli.selection import Selection, selecting
from torchop.extend import Operator
from torchop.testing._processes import ChildError
from torchop.testing._samples import with_fake_tensors
from torchop.testing._timing import Timing, Way, timed, way
from torchop.testing.probes import mapped, tensors_of

_SECONDS = 0.3  # for one way of calling, unless a call takes longer
_LIMIT = 120.0  # seconds for one operator
_FUNCTION = "its function alone"
_CALL = "torch.ops, no_grad"


class Costs(NamedTuple):
    """Microseconds for a call, by the way of calling, and what it comes to."""

    op: str
    call: str
    microseconds: Mapping[str, float]
    explanation: str

    def lines(self) -> list[str]:
        """The table, and where the time of a call without gradients goes."""
        rows = [("way of calling", "us", "above the function")]
        function = self.microseconds.get(_FUNCTION)
        for name, microseconds in self.microseconds.items():
            above = ""
            if function is not None and name != _FUNCTION:
                above = f"{microseconds - function:+.2f}"
            rows.append((name, f"{microseconds:.2f}", above))
        lines = [f"{self.op}{self.call}", *aligned(rows).splitlines()]
        cost = self.microseconds.get(_CALL)
        if function is not None and cost:
            share = min(100.0, 100 * function / cost)
            lines.append(f"The function is {share:.0f} % of a call ({_CALL}).")
        return [*lines, *self.explanation.splitlines(), ""]


_CALL_OPTION = click.option(
    "--call",
    "text",
    metavar="ARGUMENTS",
    help="The arguments in Python, such as 'torch.ones(3), dim=0'. The default are the registered "
    "examples.",
)


@click.command()
@selecting
@_CALL_OPTION
@click.option("--grad", is_flag=True, help="Let floating-point tensors require gradients.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(selection: Selection, text: str | None, grad: bool, as_json: bool) -> None:
    """Says which kernels a call runs, and whether it is native.

    The calls are the registered examples, or the one that --call gives. The operators do not run.
    """
    explained = []
    for op in selection.operators:
        for call in calls_of(op, text):
            args, kwargs = with_gradients(call) if grad else call
            shown = described((args, kwargs))
            try:
                explanation = torchop.explain(op, *args, **kwargs)
            except Exception as error:
                raise click.ClickException(f"{op}{shown}: {first_line(error)}") from None
            explained.append({"op": op, "call": shown, **explanation._asdict()})
            if not as_json:
                click.echo(f"{shown}\n{explanation}\n")
    if as_json:
        click.echo(json.dumps(explained, indent=1))


@click.command()
@selecting
@_CALL_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(selection: Selection, text: str | None, as_json: bool) -> None:
    """Measures calls of operators, and shows where the time goes.

    Each operator runs in a process of its own, with its first registered example, or with the
    arguments of --call. The different ways to call it take turns. The fastest round of each counts.
    """
    preload([__name__, *selection.modules])
    try:
        torchop.native.wait()  # not in the child, whose time is limited
    except NativeUnavailableError as error:
        click.echo(error, err=True)
    results = []
    for op in selection.operators:
        try:
            with answers_of(
                "forkserver", _costs, (op, text), _LIMIT, selection.modules
            ) as messages:
                results.append(next(messages))
        except (ChildError, click.ClickException) as error:
            name = f"{op}: " if isinstance(error, ChildError) else ""
            click.echo(f"not measured: {name}{error}", err=True)
            continue
        if not as_json:
            click.echo("\n".join(results[-1].lines()))
    if as_json:
        click.echo(json.dumps([result._asdict() for result in results], indent=1))
    if not results:
        raise click.ClickException("no operator could be measured")


def calls_of(op: str, text: str | None) -> list[Call]:
    """The calls of an operator.

    Raises:
        click.ClickException: they cannot be had.
    """
    if text is not None:
        return [_evaluated(text)]
    called = operator_of_examples(op, "examples")
    try:
        return [called.flat_arguments(*example) for example in make_examples(op)]
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
    except (Exception, SystemExit) as error:
        raise click.ClickException(f"--call {text!r}: {first_line(error)}") from None
    return call


def with_gradients(call: Call) -> Call:
    """The call with floating-point tensors that require grad."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        can_have_one = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(can_have_one)

    changed: Call = mapped(call, change)
    return changed


def described(call: Call) -> str:
    """The arguments of a call in one line: tensors by dtype and shape."""
    return call_record.described(call_record.record_of(*call))


# --------------------------------------------------------------------------------------------------
# In the child


def _costs(op: str, text: str | None) -> Iterator[Any]:
    """What is called, for messages, and then the costs."""
    try:
        if Operator(op, "bench").effect is not None:
            raise click.ClickException(f"{op} has an effect, which a measurement would repeat")
        call = mapped(calls_of(op, text)[0], torch.Tensor.detach)
        yield f"a call with {described(call)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operators without a formula
            microseconds = _measured(dict(_ways(op, call)), call)
        with torch.no_grad():  # after calls, because the first one finds the kernel
            explanation = torchop.explain(op, *call[0], **call[1])
        yield Costs(op, described(call), microseconds, str(explanation))
    except click.ClickException:
        raise
    except Exception as error:
        raise click.ClickException(f"{op}: {first_line(error)}") from None


def _ways(op: str, call: Call) -> Iterator[tuple[str, Way]]:
    operator = Operator(op, "bench")
    overload, schema = operator.overload, operator.schema
    if operator.function is not None and not operator.takes_structures:
        yield _FUNCTION, way(operator.function, schema, call, torch.no_grad)
    yield _CALL, way(overload, schema, call, torch.no_grad)
    yield f"{_CALL}, without native calls", way(overload, schema, call, _dispatched)
    yield "torch.ops, inference mode", way(overload, schema, call, torch.inference_mode)
    if schema.is_functional:
        learning = with_gradients(call)
        backward = functools.partial(_forward_and_backward, overload)
        yield "torch.ops, recording a gradient", way(overload, schema, learning, torch.enable_grad)
        yield "torch.ops, and backward", way(backward, schema, learning, torch.enable_grad)
    fake_mode, (args, kwargs) = with_fake_tensors(call)
    fake = functools.partial(overload, *args, **kwargs)
    yield "torch.ops, with fake tensors", Way(lambda: fake, lambda: fake_mode)


@contextlib.contextmanager
def _dispatched() -> Iterator[None]:
    with torch.no_grad(), torchop.native.disabled():
        yield


def _forward_and_backward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    results = [r for r in tensors_of(function(*args, **kwargs)) if r.requires_grad]
    if not results:
        raise ValueError("no result requires grad")
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def _measured(ways: dict[str, Way], call: Call) -> dict[str, float]:
    """Microseconds for a call in each way that works; the operator's own call must."""
    logging.disable()  # PyTorch logs what it raises of fake kernels
    try:
        timings = timed(ways, call, _SECONDS)
    finally:
        logging.disable(logging.NOTSET)
    error = timings[_CALL]
    if isinstance(error, Exception):
        raise click.ClickException(f"the call raises {first_line(error)}") from error
    # A way that raises is left out, such as one without a gradient.
    return {name: round(t.best, 3) for name, t in timings.items() if isinstance(t, Timing)}
