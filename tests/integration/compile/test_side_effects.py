from __future__ import annotations

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor

from tests._support.common import on_both

# torchop warns if an effect is not declared in the definition, but later, as in these tests.
declares_effect_later = pytest.mark.filterwarnings("ignore::torchop.SchemaWarning")


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
