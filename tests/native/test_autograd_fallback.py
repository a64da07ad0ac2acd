"""Calls of operators without an autograd registration, with tensors that require grad."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import torchop
from tests._support.common import needs_native, node_of, outcome
from tests._support.devices import BACKEND

pytestmark = needs_native


@pytest.fixture
def library(namespace: str) -> Iterator[torch.library.Library]:
    library = torch.library.Library(namespace, "FRAGMENT")
    yield library
    library._destroy()


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape or (2,), requires_grad=True)


def without_history(x, *args, y=None):
    return x.detach() * 2


def write(x, *args, y=None):
    x.add_(1)


def write_without_grad(x, *args, y=None):
    with torch.no_grad():
        x.add_(1)


def write_and_return(x, *args, y=None):
    return x.add_(1)


OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "cut off": ("(Tensor x, *, Tensor? y=None) -> Tensor", without_history),
    "differentiated inside": ("(Tensor x) -> Tensor", lambda x: x * x),
    "integers": ("(Tensor x) -> Tensor", lambda x: x.long()),
    "several": (
        "(Tensor x) -> (Tensor, Tensor, int, Tensor?)",
        lambda x: (x * 2, x.detach() * 3, 4, None),
    ),
    "lists": (
        "(Tensor x) -> (Tensor[], Tensor)",
        # The kernel returns a tuple for the schema's list, so the call must convert the tuple.
        lambda x: ((x * 2, x.detach() * 3), x.detach() * 4),
    ),
    "a list that may hold None": ("(Tensor x) -> Tensor?[]", lambda x: [x * 2, x.detach()]),
    "twice the same": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x.detach(),) * 2),
    "the input": ("(Tensor x) -> Tensor", lambda x: x),
    "in lists": (
        "(Tensor[] x, Tensor?[] y) -> Tensor",
        lambda x, y: torch.stack([t for t in (*x, *y) if t is not None]).detach(),
    ),
    "in an optional list": ("(Tensor x, Tensor[]? y) -> Tensor", lambda x, y: y[0].detach() * 2),
    "written": ("(Tensor(a!) x) -> ()", write),
    "written without grad": ("(Tensor(a!) x) -> Tensor", write_without_grad),
    "written, keyword-only": ("(*, Tensor(a!) x, Tensor y) -> ()", write),
    "returned in place": ("(Tensor(a!) x) -> Tensor(a!)", write_and_return),
    "too few": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x,)),
    "two of three": ("(Tensor x) -> (Tensor, Tensor, Tensor)", lambda x: (x.detach(), x * 2)),
    "no tensor": ("(Tensor x) -> Tensor", lambda x: "text"),
    "raising": ("(Tensor x) -> Tensor", lambda x: x + "text"),
}


def tensors() -> list[Tensor]:
    base, other = leaf(3, 2), leaf(3, 2)
    with torch.no_grad():
        view_without_grad = base[0]
    views = [leaf()[:], (other * 1)[0], other.unbind(0)[0], view_without_grad]
    return [leaf(), leaf() * 1, *views, torch.ones(2)]


def arguments(kind: str, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    fixed = torch.ones(2)
    if kind == "in lists":
        return ([fixed, x], [None, fixed]), {}
    if kind == "in an optional list":
        return (fixed, [x]), {}
    if kind == "written, keyword-only":
        return (), {"x": x, "y": leaf()}
    return (x,), {"y": leaf()} if kind == "cut off" else {}


def observed(op: Any, kind: str, x: Tensor) -> list[Any]:
    args, kwargs = arguments(kind, x)
    inputs = _pytree.tree_leaves((args, kwargs))
    result = outcome(lambda: op(*args, **kwargs))
    tensors = [t for t in _pytree.tree_leaves([result, inputs]) if isinstance(t, Tensor)]
    observations: list[Any] = [str(result)]
    observations += [outcome(lambda t=t: (str(t), t._version, node_of(t))) for t in tensors]
    observations.append(
        [next(i for i, t in enumerate(tensors) if t is tensor) for tensor in tensors]
    )
    ends = [
        t
        for t in tensors
        if t.requires_grad and not isinstance(outcome(lambda t=t: t.grad_fn), tuple)
    ]
    sources = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if ends:
            total = sum(t.sum() for t in ends)
            call = lambda: torch.autograd.grad(total, sources, allow_unused=True)  # noqa: E731 short
            observations.append(str(outcome(call)))
    return [*observations, [str(warning.message) for warning in warned]]


def defined(library: Any, kind: str) -> Any:
    schema, kernel = OPERATORS[kind]
    library.define(f"op{schema}")
    library.impl("op", kernel, BACKEND)
    return getattr(torch.ops, library.ns).op


@contextlib.contextmanager
def fallback_mode(mode: str) -> Iterator[None]:
    before = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode(mode)
    try:
        yield
    finally:
        torch._C._set_autograd_fallback_mode(before)


# torchop warns that the dispatcher ignores the tensors in an optional list.
@pytest.mark.filterwarnings("ignore:.*the dispatcher ignores the tensors:torchop.SchemaWarning")
@pytest.mark.parametrize("package", [torch.library, torchop])
@pytest.mark.parametrize("kind", OPERATORS)
def test_calls_and_gradients_equal_the_dispatchers(namespace, package, kind):
    library = package.Library(namespace, "FRAGMENT")
    op = defined(library, kind)
    with torchop.accelerate(f"{namespace}::*"):
        # The first call to a torchop operator never takes the native path, so call it first.
        observed(op, kind, torch.ones(2))
        start = torchop.native.counters(op).get("native", 0)
        calls = 0
        for mode in ("warn", "nothing"):
            with fallback_mode(mode):
                for native, dispatched in zip(tensors(), tensors(), strict=True):
                    with torchop.native.disabled():
                        expected = observed(op, kind, dispatched)
                    assert observed(op, kind, native) == expected
                    calls += 1
        counted = torchop.native.counters(op)
    library._destroy()
    if package is torchop and "Tensor?[]" in OPERATORS[kind][0].partition("->")[2]:
        # torchop checks the results in a list that may hold None, so these calls use the
        # dispatcher. torch.library has no such check.
        assert counted == {"operator": 2 * calls}
    else:
        assert counted == {"native": start + calls, "switched_off": calls}


def test_the_warning_names_the_operator_of_each_overload(namespace, library):
    for name in ("op", "op.per_tensor"):
        library.define(f"{name}(Tensor x, {'float' if '.' in name else 'Tensor'} y) -> Tensor")
        library.impl(name, without_history, BACKEND)
    packet = getattr(torch.ops, namespace).op
    with torchop.accelerate(f"{namespace}::*"):
        for y in (torch.ones(2), 0.5):
            with pytest.warns(UserWarning, match=f"^{namespace}::op: an autograd kernel was not"):
                packet(leaf(), y).sum().backward()
        for name in packet.overloads():
            assert torchop.native.counters(getattr(packet, name)) == {"native": 1}


def test_nodes_outlive_the_operator(namespace, library):
    op = defined(library, "cut off")
    with torchop.accelerate(f"{namespace}::*"):
        result = op(leaf())
        library._destroy()
    with pytest.warns(UserWarning, match=f"^{namespace}::op: an autograd kernel was not"):
        result.sum().backward()


def test_calls_inside_of_calls(namespace, library):

    def halve(x):
        return x.detach() if x.sum() < 1 else op(x / 2)

    library.define("op(Tensor x) -> Tensor")
    library.impl("op", halve, BACKEND)
    op = getattr(torch.ops, namespace).op
    with torchop.native.disabled():
        expected = str(op(leaf(8)))
    with torchop.accelerate(f"{namespace}::*"):
        assert str(op(leaf(8))) == expected
        assert torchop.native.counters(op) == {"native": 5}


def test_anomaly_detection_uses_the_dispatcher(namespace, library):
    op = defined(library, "cut off")
    with (
        torchop.accelerate(f"{namespace}::*"),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        node = op(leaf()).grad_fn
        assert "traceback_" in node.metadata
        assert torchop.native.counters(op) == {"anomaly": 1}


def test_modes_without_grad_record_no_node(namespace, library):
    op = defined(library, "cut off")
    with torchop.accelerate(f"{namespace}::*"):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not op(leaf()).requires_grad
        assert torchop.native.counters(op) == {"native": 2}
