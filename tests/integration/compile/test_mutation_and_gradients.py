from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.devices import TYPE
from tests.integration.compile.graphs import BACKENDS
from tests.integration.compile.mutating import FORMS, assert_equals_eager, define, inputs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_autocast_writes_into_the_tensor_of_the_caller(namespace, form, backend):
    write = define(form, namespace, torchop)
    torchop.register_autocast(f"{namespace}::accumulate", TYPE, torch.bfloat16)

    def function(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(TYPE, torch.bfloat16):
            z = x + 1
            write(x, y)
            write(z[1:], y[1:])
        return z * 2

    assert_equals_eager(torch.compile(function, backend=backend, fullgraph=True), function)
    x, y = inputs()
    function(x, y)
    # The result shows that autocast casts `y` to bfloat16, but not `x`, because `x` is mutated.
    assert_close(x, inputs()[0] * 2 + y.bfloat16().float())


def _without_grad(write, leaf, x):
    with torch.no_grad():
        write(leaf, x)


def _result_of_an_intermediate(write, leaf, x):
    target = leaf * 1
    result = write(target, x)
    return target.sum() if result is None else result.sum()


GRADIENTS: dict[str, Callable[..., Any]] = {
    "a leaf is written": lambda write, leaf, x: write(leaf, x),
    "a view of a leaf is written": lambda write, leaf, x: write(leaf[1:], x[1:]),
    "a leaf is written without grad": _without_grad,
    "a leaf is read": lambda write, leaf, x: write(x, leaf),
    "the result of an intermediate": _result_of_an_intermediate,
}


@pytest.mark.filterwarnings("ignore:.* so no gradient flows back:UserWarning")
@pytest.mark.pairwise
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_mutating_a_tensor_with_grad_raises_as_in_eager_mode(namespace, name, form, backend):
    write = define(form, namespace, torchop)

    def outcome(function: Callable[..., Any]) -> tuple[str, Any]:
        leaf, x = torch.ones(4, requires_grad=True), torch.ones(4)
        try:
            result = function(leaf, x)
            if isinstance(result, Tensor):
                result.sum().backward()
        except RuntimeError as error:
            return str(error), None
        return "", (leaf.detach(), leaf.grad, x.detach(), x.requires_grad)

    def function(leaf: Tensor, x: Tensor) -> Any:
        return GRADIENTS[name](write, leaf, x)

    message, values = outcome(function)
    compiled_message, compiled_values = outcome(
        torch.compile(function, backend=backend, fullgraph=True)
    )
    assert bool(compiled_message) is bool(message)
    assert message in compiled_message.replace("\\'", "'")
    if values is not None:
        assert_close(compiled_values[:1], values[:1])
        assert_close(compiled_values[2:3], values[2:3])
        assert (compiled_values[1] is None, compiled_values[3]) == (values[1] is None, values[3])


def test_operators_with_out_are_refused_where_something_requires_grad(namespace):
    write = define("out", namespace, torchop)
    compiled = torch.compile(
        lambda leaf, x: write(x, leaf * 1), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(
        (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported),
        match=rf"{namespace}::accumulate: functions with out=.* don.*t support automatic diff",
    ):
        compiled(torch.ones(2, requires_grad=True), torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_memory_without_gradient_is_written_in_a_program_that_trains(namespace, form, backend):
    write = define(form, namespace, torchop)

    def function(weight: Tensor, statistics: Tensor, x: Tensor) -> Tensor:
        hidden = (x * weight).sin()
        write(statistics, hidden.detach())
        return (hidden * 2).sum()

    outcomes = []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        weight = torch.full((4,), 0.5, requires_grad=True)
        statistics = torch.ones(4)
        loss = call(weight, statistics, torch.arange(4.0))
        loss.backward()
        outcomes.append((loss.detach(), statistics, weight.grad))
    assert_close(outcomes[1], outcomes[0])
