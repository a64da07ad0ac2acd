from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.integration.differential.calls import Arguments, CallSpec
from tests.integration.differential.describe import (
    Described,
    Names,
    describe,
    describe_error,
    thread_state,
)
from tests.integration.differential.operators import Operator
from tests.integration.differential.scripts import Running, Script
from tests.integration.differential.situations import EVERY
from tests.integration.differential.spec import OperatorSpec
from tests.integration.differential.tensors import Loud, Overriding

# Part of a warning that an operator issues only once.
_ONCE = "so no gradient flows back through the written values"


class Example(NamedTuple):
    """A generated example.

    `script` contains the actions of the kernel and the formula, and `situation` names the context
    of the call, such as a mode.
    """

    operator: OperatorSpec
    call: CallSpec
    script: Script
    situation: str
    native_first: bool = True
    afterwards: str = "backward"  # or "backward twice", "write into inputs"

    def __repr__(self) -> str:
        lines = [
            f"operator: {self.operator!r}",
            f"call: {self.call!r}",
            f"inside: {self.script!r}",
            f"around: {self.situation}",
            f"then: {self.afterwards}{'' if self.native_first else ', dispatched first'}",
        ]
        return "\n    ".join(["", *lines])


def observe(example: Example, operator: Operator) -> dict[str, Described]:
    names = Names()
    arguments = Arguments(example.call)
    for index, tensor in enumerate(arguments.tensors):
        names.add(tensor, f"tensor {index}")
    running = Running(example.script, names)
    seen: dict[str, Described] = {}
    Loud.calls.clear()
    Overriding.calls.clear()
    with warnings.catch_warnings(record=True) as warned, running:
        warnings.simplefilter("always")
        result = _run(example, operator, arguments, running, seen)
        seen["subclasses saw"] = [list(Loud.calls), list(Overriding.calls)]
        seen["result"] = describe(result, names)
        seen["arguments"] = describe(arguments.values, names)
        seen["backward"] = _differentiate(example, result, arguments, names)
    seen["events"] = running.events
    seen["warnings"] = [
        f"{w.category.__name__}: {w.message}" for w in warned if _ONCE not in str(w.message)
    ]
    seen["thread"] = thread_state()
    return _without_addresses(seen)


def _run(
    example: Example,
    operator: Operator,
    arguments: Arguments,
    running: Running,
    seen: dict[str, Described],
) -> Any:
    function = getattr(operator, example.call.through)
    try:
        return EVERY[example.situation](function, arguments, running)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        seen["error"] = describe_error(error)
        return None


def _differentiate(example: Example, result: Any, arguments: Arguments, names: Names) -> Described:
    outputs = [t for t in _tensors(result) if _is_recorded(t)]
    outputs = [t for t in outputs if type(t) is Tensor and t.layout is torch.strided]
    if not outputs or any(t.is_meta for t in outputs):
        return None
    wanted = [t for t in _tensors(arguments.values) if _requires_grad(t)]
    seen: list[Described] = []
    if example.afterwards == "write into inputs":
        with contextlib.suppress(RuntimeError), torch.no_grad():
            for tensor in wanted:
                tensor.mul_(2)
    times = 2 if example.afterwards == "backward twice" else 1
    for _ in range(times):
        try:
            grads = torch.autograd.grad(
                outputs,
                wanted,
                [torch.ones_like(t) for t in outputs],
                allow_unused=True,
                create_graph=example.afterwards == "create_graph",
            )
        except Exception as error:
            seen.append(describe_error(error))
        else:
            seen.append(describe(grads, names))
    return seen


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _is_recorded(tensor: Tensor) -> bool:
    return _requires_grad(tensor) and tensor.grad_fn is not None


def _requires_grad(tensor: Tensor) -> bool:
    try:
        return tensor.requires_grad and (tensor.is_leaf or tensor.grad_fn is not None)
    except RuntimeError:
        return False


_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _without_addresses(value: Described) -> Described:
    if isinstance(value, str):
        return _ADDRESS.sub("0x", value)
    if isinstance(value, (list, tuple)):
        return [_without_addresses(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_addresses(item) for key, item in value.items()}
    return value


def differences(one: Described, other: Described, path: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        lines = []
        for key in dict.fromkeys([*one, *other]):
            lines += differences(
                one.get(key, "(nothing)"), other.get(key, "(nothing)"), f"{path}/{key}"
            )
        return lines
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line
            for index, (left, right) in enumerate(zip(one, other, strict=True))
            for line in differences(left, right, f"{path}/{index}")
        ]
    return [] if one == other else [f"{path}: {one!r} != {other!r}"]
