"""`python -m torchop explain` and `bench`: explain and time calls to operators.

The arguments of the calls come from registered examples or from the command line.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import click
import torch

import torchop
from torchop import MissingRuleError
from torchop._accelerate.accelerate import aligned
from torchop._inspect import call_record
from torchop._rules.providers import choice_of_call
from torchop._rules.providers.measurements import Measured
from torchop._rules.user.examples import make_examples, operator_of_examples
from torchop.cli.child_process import ChildError, answers_of, first_line, preload, report_errors
from torchop.cli.measure import Call
from torchop.cli.selection import Selection, selecting
from torchop.extend import Operator
from torchop.native import NativeUnavailableError
from torchop.testing._samples import with_fake_tensors
from torchop.testing._timing import Timing, Way, timed, way
from torchop.testing._tune import measure_kernels, why_not
from torchop.testing.probes import mapped, requiring_grad, tensors_of
from torchop.testing.process_state import quiet

_SECONDS = 0.3  # how long each way of calling is measured, unless a single call takes longer
_LIMIT = 120.0  # the time limit for an operator, in seconds
_FUNCTION = "its function alone"
_CALL = "torch.ops, no_grad"


_OPERATOR = "the operator"  # contains a space, so no provider can have this name


class Comparison(NamedTuple):
    """The time that one call takes with each kernel of an operator, and through the operator.

    Each kernel belongs to a provider, such as "triton". `chosen` is the provider that the operator
    selects for this call.
    """

    op: str
    call: str
    chosen: str
    kernels: tuple[Measured, ...]
    operator: Measured
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        rows = [("kernel", "us", "interval"), *((k.label, *k.times) for k in self.kernels)]
        rows.append((f"{_OPERATOR}, which runs {self.chosen}", *self.operator.times))
        return [f"{self.op}{self.call}", *aligned(rows).splitlines(), *self.problems, ""]

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary for JSON output. Scripts rely on its keys, so do not rename them."""
        kernels = [
            {name: getattr(kernel, name) for name in ("provider", "config", *_TIMES)}
            for kernel in self.kernels
        ]
        operator = {name: getattr(self.operator, name) for name in _TIMES}
        return {**self._asdict(), "kernels": kernels, "operator": operator}


_TIMES = "microseconds", "interval"


class Costs(NamedTuple):
    """The time of each way to call an operator, in microseconds, and an explanation of the call.

    For example, one way to call an operator is through `torch.ops` under no_grad. `explanation` is
    the text that `torchop.explain` returns.
    """

    op: str
    call: str
    microseconds: Mapping[str, float]
    explanation: str

    def lines(self) -> list[str]:
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

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def _sizes(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[str, tuple[int, ...]] | None:
    if text is None:
        return None
    name, _, values = text.partition("=")
    try:
        return name, tuple(map(int, values.split(",")))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not like 'n=1,16,256'") from None


_CALL_OPTION = click.option(
    "--call",
    "text",
    metavar="ARGUMENTS",
    help="The arguments as Python code, such as 'torch.ones(3), dim=0'. By default, the registered "
    "examples.",
)


@click.command()
@selecting
@_CALL_OPTION
@click.option("--grad", is_flag=True, help="Make floating-point tensors require grad.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(selection: Selection, text: str | None, grad: bool, as_json: bool) -> None:
    """Show which kernels a call would run, and whether the call would bypass the dispatcher.

    The calls are not executed. Their arguments are the registered examples, or come from --call.
    """
    explained = []
    for op in selection.operators:
        for call in calls_of(op, text):
            args, kwargs = requiring_grad(call) if grad else call
            shown = described(op, (args, kwargs))
            with report_errors(f"{op}{shown}"):
                explanation = torchop.explain(op, *args, **kwargs)
            explained.append({"op": op, "call": shown, **explanation._asdict()})
            if not as_json:
                click.echo(f"{shown}\n{explanation}\n")
    if as_json:
        click.echo(json.dumps(explained, indent=1))


@click.command()
@selecting
@_CALL_OPTION
@click.option("--providers", is_flag=True, help="Compare the kernels of providers.")
@click.option(
    "--over",
    "sizes",
    metavar="NAME=SIZES",
    callback=_sizes,
    help="Compare for several sizes, such as n=1,16,256, of a NAME in the arguments of --call.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    selection: Selection,
    text: str | None,
    providers: bool,
    sizes: tuple[str, tuple[int, ...]] | None,
    as_json: bool,
) -> None:
    """Time calls to operators in several ways.

    For example, calls are timed with no_grad, in inference mode and with a backward pass. Each
    operator runs in a separate process, with the first registered example or the arguments of
    --call. The command times all ways in turn, for several rounds. The table shows the fastest
    round of each way.

    With --providers, the command times all kernels whose results agree with the reference, and the
    operator itself, for all examples. The table shows the median and a 95 % confidence interval.
    """
    if sizes and not providers:
        raise click.UsageError("--over is an option of --providers")
    if sizes and (text is None or not sizes[0].isidentifier()):
        raise click.UsageError("--over requires --call with arguments that contain the name")
    preload([__name__, *selection.modules])
    try:
        torchop.native.wait()  # compile here, because the time of the child process is limited
    except NativeUnavailableError as error:
        click.echo(error, err=True)
    results: list[Any] = []
    for op in selection.operators:
        function, args = (_comparisons, (op, text, sizes)) if providers else (_costs, (op, text))
        try:
            with answers_of(function, args, _LIMIT, selection.modules) as messages:
                for result in messages:
                    results.append(result)
                    if not as_json:
                        click.echo("\n".join(result.lines()))
        except (ChildError, click.ClickException) as error:
            name = f"{op}: " if isinstance(error, ChildError) else ""
            click.echo(f"not measured: {name}{error}", err=True)
    if as_json:
        click.echo(json.dumps([result.as_json() for result in results], indent=1))
    if not results:
        raise click.ClickException("no operator could be measured")


def calls_of(op: str, text: str | None) -> list[Call]:
    if text is not None:
        return [_evaluated(text)]
    called = operator_of_examples(op, "examples")
    with report_errors(f"the examples of {op}"):
        try:
            return [called.flat_arguments(*example) for example in make_examples(op)]
        except MissingRuleError:
            raise click.ClickException(
                f"{op} has no examples; pass the arguments: --call 'torch.ones(3)'"
            ) from None


def _evaluated(text: str, **sizes: int) -> Call:
    # Evaluating this text is safe, because it comes from the user's command line, as with `python
    # -c`.
    names = {"torch": torch, "capture": lambda *args, **kwargs: (args, kwargs), **sizes}
    with report_errors(f"--call {text!r}"):
        call: Call = eval(f"capture({text})", names)
    return call


def described(op: str, call: Call) -> str:
    return call_record.described(op, call_record.record_of(*call))


def _costs(op: str, text: str | None) -> Iterator[Any]:
    """Yield a description of the call (for error messages), and then the costs.

    This generator runs in the child process.
    """
    with report_errors(op):
        if Operator(op, "bench").effect is not None:
            raise click.ClickException(f"{op} has an effect, so measuring would repeat it")
        call = mapped(calls_of(op, text)[0], torch.Tensor.detach)
        yield f"a call with {described(op, call)}"
        with quiet():  # hide warnings about operators without a formula
            microseconds = _measured(dict(_ways(op, call)), call)
        with torch.no_grad():  # explain after the calls, because the first call selects the kernel
            explanation = torchop.explain(op, *call[0], **call[1])
        yield Costs(op, described(op, call), microseconds, str(explanation))


def _comparisons(
    op: str, text: str | None, sizes: tuple[str, tuple[int, ...]] | None
) -> Iterator[Any]:
    """For each call, yield a description for error messages, and then a `Comparison`."""
    operator = Operator(op, "bench")
    with report_errors(op):
        if text is not None and sizes is not None:
            calls = [_evaluated(text, **{sizes[0]: size}) for size in sizes[1]]
        else:
            calls = calls_of(op, text)
        for given in calls:
            call = mapped(given, torch.Tensor.detach)
            yield f"a call with {described(op, call)}"
            choice, full = choice_of_call(operator.overload, *call)
            if (problem := why_not(operator, choice)) is not None:
                raise click.ClickException(f"{op}: {problem}")
            assert choice is not None  # checked by `why_not`
            with quiet():  # hide warnings about skipped providers
                others = {_OPERATOR: operator.overload}
                measured, problems = measure_kernels(choice, full, others=others)
                chosen = torchop.explain(operator.overload, *call[0], **call[1]).provider
            alone = tuple(each for each in measured if each.provider != _OPERATOR)
            (whole,) = (each for each in measured if each.provider == _OPERATOR)
            yield Comparison(op, described(op, call), chosen or "", alone, whole, tuple(problems))


def _ways(op: str, call: Call) -> Iterator[tuple[str, Way]]:
    """Yield the ways to call an operator that `bench` compares. Runs in the child process."""
    operator = Operator(op, "bench")
    overload, schema = operator.overload, operator.schema
    if operator.function is not None and not operator.takes_structures:
        yield _FUNCTION, way(operator.function, schema, call, torch.no_grad)
    yield _CALL, way(overload, schema, call, torch.no_grad)
    yield f"{_CALL}, without native calls", way(overload, schema, call, _dispatched)
    yield "torch.ops, inference mode", way(overload, schema, call, torch.inference_mode)
    if schema.is_functional:
        learning = requiring_grad(call)
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
    """Return the microseconds that each way of calling takes. Omit ways that raise an error."""
    timings = timed(ways, call, _SECONDS)
    error = timings[_CALL]
    if isinstance(error, Exception):
        raise click.ClickException(f"the call raises {first_line(error)}") from error
    # Skip ways of calling that raised an error, such as calling with a backward pass if no result
    # requires grad.
    return {name: round(t.best, 3) for name, t in timings.items() if isinstance(t, Timing)}
