from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import torchop
from tests._support.common import needs_native, node_of, outcome
from tests.accelerate.support import counts_versions_once

pytestmark = [needs_native, counts_versions_once]


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape or (2,), requires_grad=True)


def write(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def view_without_grad() -> Tensor:
    base = leaf(3, 2)
    with torch.no_grad():
        return base[0]


WRITTEN: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.ones(2),
    "leaf": leaf,
    "no leaf": lambda: leaf() * 1,
    "view": lambda: (leaf(2, 2) * 1)[0],
    "view of a leaf": lambda: leaf(2, 2)[0],
    "one of several views": lambda: leaf(2, 2).unbind(0)[0],
    "view without grad": view_without_grad,
}
# For each kind of operator: its schema, its tag, its kernel, and a function that returns the
# arguments for two tensors x and y, of which the operator mutates x.
OPERATORS: dict[str, tuple[str, str, Callable[..., Any], Callable[..., Any]]] = {
    "nothing": (
        "(Tensor(a!) x, Tensor y) -> ()",
        "",
        write,
        lambda x, y: ((x, y), {}),
    ),
    "tensor": (
        "(Tensor(a!) x, Tensor y) -> Tensor",
        "",
        lambda x, y: x.add_(y) * 2,
        lambda x, y: ((x, y), {}),
    ),
    "list": (
        "(Tensor(a!)[] x, Tensor y) -> Tensor[]",
        "",
        lambda x, y: [t.add_(y) * 2 for t in x],
        lambda x, y: (([x, y.detach().clone()], y), {}),
    ),
    "inplace": (
        "(Tensor(a!) x, Tensor y) -> Tensor(a!)",
        "inplace",
        lambda x, y: x.add_(y),
        lambda x, y: ((x, y), {}),
    ),
    "out": (
        "(Tensor y, *, Tensor(a!) x) -> Tensor(a!)",
        "out",
        lambda y, *, x: x.copy_(y),
        lambda x, y: ((y,), {"x": x}),
    ),
}


def made(namespace: str, kind: str) -> Any:
    schema, tag, kernel, _ = OPERATORS[kind]
    options = {"tags": (getattr(torch.Tag, tag),)} if tag else {}
    return torch.library.custom_op(
        f"{namespace}::op", kernel, mutates_args=("x",), schema=schema, **options
    )


def observed(op: Any, kind: str, written: str, grad: bool) -> list[Any]:
    x, y = WRITTEN[written](), leaf() if grad else torch.ones(2)
    args, kwargs = OPERATORS[kind][-1](x, y)
    result = outcome(lambda: op(*args, **kwargs))
    seen: list[Any] = [str(result), result is x]
    tensors = [t for t in _pytree.tree_leaves([result, args, kwargs]) if isinstance(t, Tensor)]
    for tensor in tensors:
        seen.append(outcome(lambda t=tensor: (str(t), t._version, t.requires_grad, node_of(t))))
    ends = [t for t in _pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    if ends:
        seen.append(outcome(lambda: sum(t.sum() for t in ends).backward()))
    return seen


@pytest.mark.parametrize("kind", OPERATORS)
def test_tensors_that_require_grad_are_written_as_by_the_dispatcher(namespace, accelerated, kind):
    handle = made(namespace, kind)
    calls = [(written, grad) for written in WRITTEN for grad in (False, True)]
    before = [observed(handle, kind, *call) for call in calls]
    with torch.no_grad():
        before += [observed(handle, kind, *call) for call in calls]
    accelerated()
    after = [observed(handle, kind, *call) for call in calls]
    counted = torchop.native.counters(handle)
    with torch.no_grad():
        after += [observed(handle, kind, *call) for call in calls]
    assert after == before
    if kind == "out":  # PyTorch does not support gradients of out= operators
        assert counted.keys() == {"native", "gradient"}
        reason = torchop.explain(handle, leaf(), x=leaf()).reason
        assert reason.startswith("it records a gradient: PyTorch refuses that, as a tensor is")
    else:
        assert counted == {"native": len(calls)}


def test_inference_tensors_are_refused_as_by_the_dispatcher(namespace, accelerated):
    handle = made(namespace, "nothing")
    with torch.inference_mode():
        x = torch.ones(2)
    before = outcome(lambda: handle(x, torch.ones(2)))
    accelerated()
    assert outcome(lambda: handle(x, torch.ones(2))) == before
    assert "Inplace update to inference tensor" in before[1]
    assert torchop.native.counters(handle) == {"mutation": 1}


def test_the_contents_of_saved_tensors_are_guarded(namespace, accelerated):
    handle = made(namespace, "nothing")
    accelerated()
    x = leaf() * 1
    result = x * x
    handle(x, torch.ones(2))
    assert torchop.native.counters(handle) == {"native": 1}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
