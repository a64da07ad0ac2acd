"""The script of a generated call, which contains the actions of the kernel and the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from tests._support.devices import AUTOGRAD
from tests._support.opaque_types import REFERENCE, Reference
from tests.integration.differential.chance import one_in
from tests.integration.differential.describe import Names, describe, thread_state
from tests.integration.differential.spec import OperatorSpec


class GeneratedError(Exception):
    pass


class Interrupt(BaseException):
    """An exception that `except Exception` does not catch, like KeyboardInterrupt."""


class OurTensor(Tensor):
    pass


class Script(NamedTuple):
    result: str = "fresh"
    writes: str = "all"  # the arguments that the kernel mutates, or "nothing"
    saves: str = "inputs"  # or "outputs", "both", "nothing", "no tensors"
    marks: str = ""  # or "non_differentiable", "no materialized gradients", "both", "dirty"
    gradients: str = "right"
    nested: bool = False  # whether the kernel uses autograd itself
    grows_lists: bool = False  # whether the kernel appends to its list arguments

    def __repr__(self) -> str:
        shown = [
            f"{name}={value!r}"
            for name, value in self._asdict().items()
            if value != self._field_defaults[name]
        ]
        return f"Script({', '.join(shown)})"


class Running:
    def __init__(self, script: Script, names: Names) -> None:
        self.script = script
        self.names = names
        self.events: list[Any] = []

    def report(self, *event: Any) -> None:
        self.events.append(event)

    def __enter__(self) -> Running:
        _running.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _running.remove(self)


_running: list[Running] = []


def current() -> Running:
    return _running[-1]


# --------------------------------------------------------------------------------------------------
# Kernels


def run_kernel(spec: OperatorSpec, origin: str, arguments: dict[str, Any]) -> Any:
    running = current()
    script = running.script
    running.report(origin, describe(arguments, running.names), thread_state())
    if origin in ("Autograd", AUTOGRAD, "ADInplaceOrView"):
        return None
    if script.result == "raises":
        raise GeneratedError(f"from the {origin}")
    if script.result == "interrupts":
        raise Interrupt
    if script.result == "raises StopIteration":
        raise StopIteration(3)
    tensors = list(_tensors(arguments.values()))
    if script.grows_lists and origin == "kernel":
        for parameter in spec.parameters:
            value = arguments.get(parameter.name)
            if isinstance(value, list) and not parameter.kind.holds_tensors:
                value.append(value[0] if value else 0)
    if script.nested:
        with torch.enable_grad():
            inner = torch.ones(2, requires_grad=True)
            running.report("nested", describe((inner * 2).requires_grad, running.names))
    mutated = [arguments[name] for name in spec.mutates_args]
    if script.writes == "all" and origin != "fake":
        for tensor in _tensors(mutated):
            tensor.fill_(1)
    if spec.form != "plain":
        values = [arguments[name] for name in spec.mutates_args]
    else:
        source = tensors[0] if tensors else None
        values = [
            _value(kind, source, index, arguments) for index, kind in enumerate(spec.returned_kinds)
        ]
    return _RESULTS[script.result](values, tensors)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _value(kind: str, source: Tensor | None, index: int, arguments: dict[str, Any]) -> Any:
    if kind == "Tensor":
        return _fresh(source, index, arguments)
    if kind == "Tensor[]":
        return [_fresh(source, index + i, arguments) for i in range(2)]
    if kind == "SymInt":
        return 2**40 + index
    if kind == "bool":
        return True
    if kind == REFERENCE:
        return _RETURNED
    return 1.5


_RETURNED = Reference(3)


def _fresh(source: Tensor | None, index: int, arguments: dict[str, Any]) -> Tensor:
    if source is None:
        return torch.full((2,), float(index))
    if index == 2:
        return torch.zeros(source.shape, dtype=torch.int64, device=source.device)
    result = source.clone()
    if result.is_floating_point() and index == 0:
        for value in arguments.values():
            # Make the result depend on the numbers, so that a number that was passed incorrectly is
            # noticed.
            if isinstance(value, float) and abs(value) < 1e6:
                result = result + value
    return result


_Results = Callable[[list[Any], list[Tensor]], Any]


def _packed(values: list[Any], tensors: list[Tensor]) -> Any:
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _first_replaced(change: Callable[[Any, list[Tensor]], Any]) -> _Results:
    def result(values: list[Any], tensors: list[Tensor]) -> Any:
        if not values:
            return change(None, tensors)
        return _packed([change(values[0], tensors), *values[1:]], tensors)

    return result


def _on_tensor(change: Callable[[Tensor], Any]) -> _Results:
    return _first_replaced(lambda value, _: change(value) if isinstance(value, Tensor) else value)


def _from_input(change: Callable[[Tensor], Any]) -> _Results:
    return _first_replaced(lambda value, tensors: change(tensors[-1]) if tensors else value)


def _requiring_grad(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _recorded(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    with torch.enable_grad():
        return tensor.detach().requires_grad_() * 2


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


_RESULTS: dict[str, _Results] = {
    "fresh": _packed,
    "0-dim": _on_tensor(lambda t: t.sum()),
    "integers": _on_tensor(lambda t: torch.zeros(t.shape, dtype=torch.int64)),
    "complex": _on_tensor(lambda t: torch.zeros(t.shape, dtype=torch.complex64)),
    "empty": _on_tensor(lambda t: torch.empty(0)),
    "view of fresh": _on_tensor(lambda t: t.reshape(-1)[:1]),
    "transposed": _on_tensor(lambda t: t.t() if t.dim() == 2 else t),
    "input": _from_input(lambda t: t),
    "view of input": _from_input(lambda t: t.view_as(t)),
    "detached input": _from_input(lambda t: t.detach()),
    "same tensor twice": lambda v, t: (
        (v[0],) * len(v) if len(v) > 1 and isinstance(v[0], Tensor) else _packed(v, t)
    ),
    "view of each other": lambda v, t: (
        (v[0], v[0].view_as(v[0]), *v[2:])
        if len(v) > 1 and isinstance(v[0], Tensor)
        else _packed(v, t)
    ),
    "None": lambda v, t: None,
    "None among several": _first_replaced(lambda value, _: None),
    "list": lambda v, t: list(v),
    "too few": lambda v, t: tuple(v[:-1]),
    "too many": lambda v, t: (*v, torch.ones(1)),
    "string": _first_replaced(lambda value, _: "a string"),
    "Parameter": _on_tensor(lambda t: torch.nn.Parameter(t.detach(), requires_grad=False)),
    "Parameter requiring grad": _on_tensor(
        lambda t: torch.nn.Parameter(t.detach()) if t.is_floating_point() else t
    ),
    "subclass": _on_tensor(lambda t: t.as_subclass(OurTensor)),
    "requiring grad": _on_tensor(_requiring_grad),
    "recorded": _on_tensor(_recorded),
    "inference tensor": _on_tensor(_inference),
    "meta": _on_tensor(lambda t: torch.empty(t.shape, device="meta")),
    "sparse": _on_tensor(lambda t: t.to_sparse()),
    "conjugated": _on_tensor(lambda t: torch.zeros(2, dtype=torch.complex64).conj()),
    "NumPy number": _first_replaced(lambda v, _: numpy.int64(3) if type(v) is int else v),
    "bool for a number": _first_replaced(lambda v, _: v if isinstance(v, Tensor) else True),
    "tensor for a number": _first_replaced(
        lambda v, _: v if isinstance(v, (Tensor, list)) else torch.tensor(2)
    ),
    "tuple for a list": lambda v, t: _packed(
        [tuple(value) if isinstance(value, list) else value for value in v], t
    ),
}
ODD_RESULTS = (*(name for name in _RESULTS if name != "fresh"), "raises", "interrupts")
ODD_RESULTS += ("raises StopIteration",)


# --------------------------------------------------------------------------------------------------
# Formulas


def run_setup_context(
    spec: OperatorSpec, ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any
) -> None:
    running = current()
    script = running.script
    seen = {
        "inputs": inputs,
        "keyword_only_inputs": keyword_only_inputs,
        "output": output,
        "needs_input_grad": ctx.needs_input_grad,
        "ctx": type(ctx).__name__,
    }
    running.report("setup_context", describe(seen, running.names), thread_state())
    outputs = output if isinstance(output, tuple) else (output,)
    kept: list[Any] = []
    if script.saves in ("inputs", "both"):
        kept += _tensors(inputs)
    if script.saves in ("outputs", "both"):
        kept += _tensors(outputs)
    if script.saves == "None too":
        kept.append(None)
    if script.saves == "no tensors":
        kept = [3]
    if script.saves == "raises":
        raise GeneratedError("from setup_context")
    ctx.save_for_backward(*kept)
    ctx.note = "kept"
    tensors = list(_tensors(outputs))
    if script.marks in ("non_differentiable", "both") and tensors:
        ctx.mark_non_differentiable(tensors[0])
    if script.marks in ("no materialized gradients", "both"):
        ctx.set_materialize_grads(False)
    if script.marks == "dirty" and tensors:
        ctx.mark_dirty(tensors[0])


def run_backward(spec: OperatorSpec, ctx: Any, grads: Any) -> Any:
    running = current()
    script = running.script
    saved = ctx.saved_tensors if spec.formula == "setup_context" else ()
    seen = {
        "grads": grads,
        "saved": saved,
        "note": getattr(ctx, "note", None),
        "needs_input_grad": ctx.needs_input_grad,
    }
    running.report("backward", describe(seen, running.names), thread_state())
    if script.gradients == "raises":
        raise GeneratedError("from backward")
    incoming = next(_tensors(grads), None)
    positional = [p for p in spec.parameters if not p.keyword_only]
    result: list[Any] = []
    for needed, parameter in zip(ctx.needs_input_grad, positional, strict=False):
        if isinstance(needed, list):
            result.append([_gradient(incoming, item, script) for item in needed])
        else:
            holds = parameter.kind.holds_tensors
            result.append(_gradient(incoming, needed, script) if holds else None)
    if script.gradients == "too few":
        result = result[:-1]
    if script.gradients == "wrong type" and result:
        result[0] = 3
    return result[0] if len(result) == 1 else tuple(result)


def _gradient(incoming: Tensor | None, needed: bool, script: Script) -> Tensor | None:
    if script.gradients == "None" or not needed or incoming is None:
        return None
    if script.gradients == "wrong shape":
        return torch.ones(7, 7)
    return incoming * 2


@st.composite
def scripts(draw: DrawFn, focus: str = "plain") -> Script:
    script = Script(writes=draw(st.sampled_from(["all", "all", "nothing"])))
    if focus == "result":
        script = script._replace(result=draw(st.sampled_from(ODD_RESULTS)))
    if focus in ("gradient", "anomaly") or draw(one_in(4)):
        script = script._replace(
            saves=draw(st.sampled_from(_SAVES)),
            marks=draw(st.sampled_from(_MARKS)),
            gradients=draw(st.sampled_from(_GRADIENTS)),
        )
    return script._replace(
        nested=draw(one_in(10)), grows_lists=draw(one_in(3 if focus == "kernel" else 10))
    )


_SAVES = (
    *("inputs", "inputs", "outputs", "outputs", "both", "both", "nothing"),
    *("no tensors", "None too", "raises"),
)
_MARKS = ("", "", "", "non_differentiable", "no materialized gradients", "both", "dirty")
_GRADIENTS = (
    *("right", "right", "right", "right", "None"),
    *("too few", "wrong type", "wrong shape", "raises"),
)
