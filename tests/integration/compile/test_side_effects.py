"""Compiled calls that do more than return a result: effects, and writing into arguments."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import on_both
from tests.integration.compile.graphs import BACKENDS


def _logging_operator(namespace: str, log: list[float]) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::log", mutates_args=())
    def record(x: Tensor, label: float) -> None:
        log.append(label + float(x.sum()))

    record.register_fake(lambda x, label: None)
    return record


# Such an operator is told to say at its definition what it does; here it says so afterwards.
says_later = pytest.mark.filterwarnings("ignore::torchop.SchemaWarning")


@says_later
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_effect_keeps_every_call_and_their_order(namespace, backend, requires_grad):
    log: list[float] = []
    record = _logging_operator(namespace, log)
    record.register_effect(torchop.EffectType.ORDERED)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        record(x, 1.0)
        y = x * 2
        record(y, 10.0)
        record(y, 10.0)
        record(x, 5.0)
        return y

    x = torch.ones(2, requires_grad=requires_grad)
    assert_close(function(x).detach(), torch.full((2,), 2.0))
    assert log == [3.0, 14.0, 14.0, 7.0]
    function(torch.zeros(2, requires_grad=requires_grad))
    assert log[4:] == [1.0, 10.0, 10.0, 5.0]


@says_later
def test_without_an_effect_a_call_that_returns_nothing_is_refused_not_dropped(namespace):
    def scenario(library, namespace):
        log = []

        @library.custom_op(f"{namespace}::log", mutates_args=())
        def record(x: Tensor, label: float) -> None:
            log.append(label)

        record.register_fake(lambda x, label: None)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: Tensor) -> Tensor:
            record(x, 1.0)
            return x * 2

        function(torch.ones(2))
        return log

    ours, stock = on_both(scenario, namespace)
    assert isinstance(ours, torch._dynamo.exc.BackendCompilerFailed)
    assert f"{namespace}::log returns nothing and mutates nothing" in str(ours)
    assert f"torchop.register_effect('{namespace}::log'" in str(ours)
    assert stock == []


@says_later
def test_an_effect_can_be_taken_back(namespace):
    record = _logging_operator(namespace, [])
    record.register_effect(torchop.EffectType.ORDERED)
    record.register_effect(None)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        record(x, 1.0)
        return x * 2

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="would remove it"):
        function(torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mutated_argument_is_written_in_the_callers_memory(namespace, backend):
    @torchop.custom_op(f"{namespace}::accumulate", mutates_args={"total"})
    def accumulate(x: Tensor, total: Tensor) -> None:
        total.add_(x)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor, total: Tensor) -> Tensor:
        accumulate(x, total)
        before = total * 10
        accumulate(x, total)
        return before + total

    total = torch.zeros(3)
    result = function(torch.ones(3), total)
    assert_close(total, torch.full((3,), 2.0))
    assert_close(result, torch.full((3,), 12.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mutating_a_view_shows_in_its_base(namespace, backend):
    @torchop.custom_op(f"{namespace}::zero_row", mutates_args={"row"})
    def zero_row(row: Tensor) -> None:
        row.zero_()

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        y = x + 1
        zero_row(y[1])
        zero_row(x[0])
        return y

    x = torch.ones(2, 2)
    assert_close(function(x), torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
    assert_close(x, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mutated_lists_and_optionals_beside_a_result(namespace, backend):
    @torchop.custom_op(f"{namespace}::scale_all", mutates_args={"xs", "maybe"})
    def scale_all(xs: list[Tensor], maybe: Optional[Tensor], factor: float) -> Tensor:
        total = sum(x.sum() for x in xs)
        for x in (*xs, *([] if maybe is None else [maybe])):
            x.mul_(factor)
        return total

    scale_all.register_fake(lambda xs, maybe, factor: xs[0].new_empty(()))

    @torch.compile(backend=backend, fullgraph=True)
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        first = scale_all([a, b], None, 2.0)
        return first + scale_all([a], c, 3.0)

    a, b, c = torch.ones(2), torch.ones(2), torch.ones(2)
    assert_close(function(a, b, c), torch.tensor(8.0))
    assert [t[0].item() for t in (a, b, c)] == [6.0, 2.0, 3.0]


def _clip_in_place(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(
        f"{namespace}::clip_",
        mutates_args={"x"},
        schema="(Tensor(a!) x, float limit) -> Tensor(a!)",
    )
    def clip_(x: Tensor, limit: float) -> Tensor:
        return x.clamp_(-limit, limit)

    return clip_


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_in_place_operator_writes_into_an_input_and_returns_it(namespace, backend):
    clip_ = _clip_in_place(namespace)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = clip_(x, 1.0)
        return y, y + 1

    x = torch.tensor([3.0, -5.0, 0.25])
    y, z = function(x)
    assert y.tolist() == x.tolist() == [1.0, -1.0, 0.25]
    assert z.tolist() == [2.0, 0.0, 1.25]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_in_place_operator_writes_into_a_tensor_made_before(namespace, backend):
    clip_ = _clip_in_place(namespace)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = clip_(y, 1.0)
        return y, z + 1

    y, z = function(torch.tensor([3.0, -5.0, 0.25]))
    assert y.tolist() == [1.0, -1.0, 0.5]
    assert z.tolist() == [2.0, 0.0, 1.5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_with_out_fills_the_buffers_of_the_caller(namespace, backend):
    @torchop.custom_op(
        f"{namespace}::minmax",
        mutates_args={"low", "high"},
        schema="(Tensor x, *, Tensor(a!) low, Tensor(b!) high) -> (Tensor(a!), Tensor(b!))",
    )
    def minmax(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.amin(x, 0, out=low), torch.amax(x, 0, out=high)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        first, second = minmax(x, low=low, high=high)
        return second - first

    low, high = torch.zeros(2), torch.zeros(2)
    assert function(torch.tensor([[1.0, 5.0], [4.0, 2.0]]), low, high).tolist() == [3.0, 3.0]
    assert (low.tolist(), high.tolist()) == ([1.0, 2.0], [4.0, 5.0])
