from __future__ import annotations

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


# torchop warns if an effect is not declared in the definition, but later, as in these tests.
declares_effect_later = pytest.mark.filterwarnings("ignore::torchop.SchemaWarning")


@declares_effect_later
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_effect_preserves_number_and_order_of_calls(namespace, backend, requires_grad):
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


@declares_effect_later
def test_call_without_results_or_effect_raises(namespace):
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


@declares_effect_later
def test_effect_can_be_removed(namespace):
    record = _logging_operator(namespace, [])
    record.register_effect(torchop.EffectType.ORDERED)
    record.register_effect(None)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        record(x, 1.0)
        return x * 2

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="would remove it"):
        function(torch.ones(2))
