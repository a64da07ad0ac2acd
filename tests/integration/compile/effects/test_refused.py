"""torchop rejects a call with an effect if a compiler or vmap would drop or repeat it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import torchop
from tests.integration.compile.effects.calls import CALLS, compiled_with, nested_regions, trained


def _in_a_branch(log: Any, x: Tensor) -> Tensor:
    def taken(x: Tensor) -> Tensor:
        log(x, 1)
        return x.sin()

    return torch.cond(x.sum() > 0, taken, lambda x: x.cos(), (x,))


def _in_a_loop(log: Any, x: Tensor) -> Tensor:
    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        log(x, 1)
        return i + 1, x + 1

    start = torch.zeros((), dtype=torch.long)
    return torch._higher_order_ops.while_loop(lambda i, x: i < 3, body, (start, x))[1]


def _in_a_scan(log: Any, x: Tensor) -> Tensor:
    def body(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        log(x, 1)
        return carry + x, carry * x

    return torch._higher_order_ops.scan(body, x.new_zeros(()), x)[1]


def _in_a_map(log: Any, x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        log(x, 1)
        return x + 1

    return torch._higher_order_ops.map(body, x)


INSIDE = {"cond": _in_a_branch, "while": _in_a_loop, "scan": _in_a_scan, "map": _in_a_map}
IN_A_GRAPH = "::log has an effect, but PyTorch drops effectful calls from a graph inside a graph"


@pytest.mark.pairwise
@compiled_with
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_call_that_a_graph_would_drop_is_rejected(
    log: Any, backend: str, inside: Any, called_before: bool
) -> None:
    def function(x: Tensor) -> Tensor:
        if called_before:
            log(x, 0)
        return inside(log, x)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=IN_A_GRAPH) as caught:
        torch.compile(function, backend=backend, fullgraph=True)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, torchop.TracingError)
    assert "torch.compiler.disable" in str(caught.value)
    assert CALLS == []


# Test both two and three calls of the region, because with three or more calls PyTorch would lose
# the gradient.
@pytest.mark.parametrize(
    ("backend", "calls"), [("aot_eager", 2), ("inductor", 2), ("aot_eager", 3)]
)
def test_a_nested_region_that_is_differentiated_is_refused(
    log: Any, backend: str, calls: int
) -> None:
    function = torch.compile(nested_regions(log, calls), backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=IN_A_GRAPH):
        trained(function)


def test_an_exported_branch_keeps_its_calls_until_it_is_decomposed(log: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _in_a_branch(log, x)

    program = torch.export.export(Model(), (torch.ones(2),))
    CALLS.clear()
    program.module()(torch.ones(2))
    assert CALLS == [1]
    with pytest.raises(torchop.TracingError, match=IN_A_GRAPH):
        program.run_decompositions()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["log", "logged"])
def test_vmap_is_refused(request: pytest.FixtureRequest, name: str, compiled: bool) -> None:
    op = request.getfixturevalue(name)

    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda x: (op(x, 1), x.sin())[1])(x)

    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        RuntimeError, match=f"::{name} has an effect, and vmap does not define"
    ) as error:
        function(torch.ones(3, 2))
    assert f"register_vmap('{op.name}'" in str(error.value)
    assert CALLS == []


@pytest.mark.parametrize("first", ["effect", "rule"])
def test_vmap_rule_decides_about_calls_with_an_effect(namespace: str, first: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: CALLS.append(len(x)), schema="(Tensor x) -> ()", **NO_EFFECT
    )
    steps: list[Callable[[], Any]] = [
        lambda: op.register_effect("ordered"),
        lambda: op.register_vmap(lambda info, in_dims, x: (op(x), None)),
    ]
    for step in steps if first == "effect" else reversed(steps):
        step()
    torch.vmap(lambda x: (op(x), x)[1])(torch.ones(3, 2))
    assert CALLS == [3]


NO_EFFECT: dict[str, Any] = {"mutates_args": (), "effects": "none"}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps_again_when_the_effect_is_taken_back(logged: Any) -> None:
    logged.register_effect(None)
    torch.vmap(lambda x: logged(x, 1))(torch.ones(3, 2))
    assert CALLS == [1, 1, 1]


def test_vmap_without_batched_arguments_calls_once(log: Any) -> None:
    y = torch.ones(2)
    torch.vmap(lambda x: (log(y, 1), x)[1])(torch.ones(3, 2))
    assert CALLS == [1]
