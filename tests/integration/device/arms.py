"""Run a scenario with native calls, through the dispatcher, and with torch.library."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchop
from tests.integration.device import target

# A scenario is a function that receives a function `define` and defines operators with it. The
# function `define` wraps `custom_op` (or the function that is passed as `by`) of torchop or of
# torch.library, and adds a namespace. The scenario returns values, tensors and exceptions in nested
# lists, so that a run with torchop can be compared with a run with torch.library.
Scenario = Callable[[Callable[..., Any]], Any]


class Seen(NamedTuple):
    outcome: Any
    trace: list[str]
    calls: Counter[str]

    def waits(self) -> Counter[str]:
        return Counter(line for line in self.trace if line.startswith("host waits"))


def native(scenario: Scenario, namespace: str) -> Seen:
    return _run(scenario, torchop.custom_op, namespace, "native")


def dispatched(scenario: Scenario, namespace: str) -> Seen:
    with torchop.native.disabled():
        return _run(scenario, torchop.custom_op, namespace, "dispatched")


def stock(scenario: Scenario, namespace: str) -> Seen:
    return _run(scenario, torch.library.custom_op, namespace, "stock")


def _run(scenario: Scenario, custom_op: Callable[..., Any], namespace: str, arm: str) -> Seen:
    made: list[Any] = []

    def define(name: str, *args: Any, by: Callable[..., Any] = custom_op, **kwargs: Any) -> Any:
        def note(op: Any) -> Any:
            made.append(op)
            return op

        result = by(f"{namespace}_{arm}::{name}", *args, **kwargs)
        is_decorator = isinstance(result, types.FunctionType)
        return (lambda function: note(result(function))) if is_decorator else note(result)

    torch.manual_seed(0)
    with target.trace() as trace:
        outcome = scenario(define)
    calls: Counter[str] = Counter()
    for op in made:
        forms = (op.functional, op.out, op.inplace) if _is_family(op) else (op,)
        for form in forms:
            if isinstance(form, torchop.CustomOp):
                calls.update(torchop.native.counters(form))
    lines = [line.replace(f"{namespace}_{arm}", "ns") for line in trace]
    return Seen(described(outcome, f"{namespace}_{arm}"), lines, +calls)


def _is_family(op: Any) -> bool:
    return isinstance(op, torchop.OperatorFamily)


def described(value: Any, namespace: str = "") -> Any:
    """Convert a value into one that can be compared between the three runs."""
    match value:
        case Tensor():
            number = value.detach().to("cpu").resolve_conj().resolve_neg().tolist()
            kind = str(value.device), value.dtype, value.stride(), value.requires_grad
            return number, kind, None if value.is_inference() else value._version
        case list() | tuple():
            return [described(item, namespace) for item in value]
        case Exception():
            return type(value).__name__, str(value).replace(namespace, "ns").splitlines()[0]
        case _:
            return value


def error_of(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")
