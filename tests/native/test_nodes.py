"""The trial of the nodes that native calls make: what it finds, where it runs, what follows."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torchop
from tests.support import needs_native
from torchop._compat import autograd
from torchop._native import switch
from torchop._native.extension import recipe

pytestmark = needs_native

Apply = Callable[[torch.Tensor], Any]


def try_nodes(make_function: Any = autograd.make_autograd_function) -> str | None:
    return switch.native_module().try_nodes(make_function, autograd.node_maker)


AROUND = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "fake tensors": FakeTensorMode,
    "a default device": lambda: torch.device("meta"),
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: 1 / 0, lambda packed: 1 / 0
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_nodes_of_this_release_are_pytorchs_whatever_the_caller_is_in(name: str):
    with AROUND[name]():
        assert try_nodes() is None
        assert torch.is_grad_enabled() == (name not in ("no_grad", "inference_mode"))
    assert recipe.difference is None


def test_nodes_are_tried_inside_a_transform():
    found: list[str | None] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append(try_nodes())
        return x.sin()

    assert torch.func.grad(f)(torch.tensor(0.0)) == 1
    assert found == [None]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_nodes_are_tried_while_torchscript_is_traced():
    found: list[str | None] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append(try_nodes())
        return x.sin()

    traced = torch.jit.trace(f, torch.ones(2))
    assert {*found} == {None}
    assert [node.kind() for node in traced.graph.nodes()] == ["aten::sin"]


def applying(change: Callable[[Apply, torch.Tensor], Any]) -> Callable[..., Any]:
    """Functions that PyTorch applies in another way, as if a release made other nodes."""

    def make_function(*parts: Any) -> Any:
        function = autograd.make_autograd_function(*parts)
        return SimpleNamespace(
            _backward_cls=function._backward_cls, apply=lambda x: change(function.apply, x)
        )

    return make_function


def of_another_class(*parts: Any) -> Any:
    other = autograd.make_autograd_function(*parts)
    function = autograd.make_autograd_function(*parts)
    return SimpleNamespace(_backward_cls=function._backward_cls, apply=other.apply)


def with_another_formula() -> Callable[..., Any]:
    made: list[Any] = []

    def make_function(name: str, forward: Any, backward: Any, jvp: Any) -> Any:
        made.append(name)
        formula = backward if len(made) == 1 else lambda *args: 2 * backward(*args)
        return autograd.make_autograd_function(name, forward, formula, jvp)

    return make_function


kept: list[Any] = []


def keeping(apply: Apply, x: torch.Tensor) -> Any:
    kept.append(apply(x))
    return kept[-1]


def saving_nothing(apply: Apply, x: torch.Tensor) -> Any:
    y = apply(x)
    y.backward(torch.ones_like(y))
    return y


WRONG = {
    "another edge": (applying(lambda apply, x: apply(x * 1)), "an edge is 1 0 and not 0 0"),
    "another output": (applying(lambda apply, x: apply(x) * 1), "its class is PyTorch's"),
    "another class": (of_another_class, "its class is PyTorch's is 1 and not 0"),
    "another formula": (with_another_formula(), r"(?s)the gradient is  24\n.* and not  48\n"),
    "nothing saved": (applying(saving_nothing), "1 1 1 2 and not 1 1 1 0"),
    "no end": (applying(keeping), "whether it ends is 1 and not 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_nodes_are_refused_with_the_difference(name: str):
    make_function, difference = WRONG[name]
    problem = try_nodes(make_function)
    kept.clear()
    start = (
        f"the autograd nodes of PyTorch {torch.__version__.partition('+')[0]} are not those that"
    )
    assert problem is not None
    assert problem.startswith(f"{start} torchop makes: ")
    assert re.search(difference, problem), problem


def test_an_error_of_the_trial_is_raised():
    def make_function(*parts: Any) -> Any:
        raise RuntimeError("no function")

    with pytest.raises(RuntimeError, match="no function"):
        try_nodes(make_function)


def test_calls_of_other_nodes_are_recorded_by_the_dispatcher(
    op: torchop.CustomOp[..., Any], monkeypatch: pytest.MonkeyPatch
):
    op.register_autograd(lambda ctx, grad: grad * 3)
    x = torch.ones(2, requires_grad=True)
    op(x)
    assert torchop.explain(op, x).native
    monkeypatch.setattr(recipe, "difference", "the nodes differ")
    op.register_autograd(lambda ctx, grad: grad * 5)  # another plan
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    assert "the nodes differ" in (torchop.explain(op, x).reason or "")
