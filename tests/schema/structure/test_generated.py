"""However an operator is called, its kernel gets the structures that Hypothesis generated."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchop
from tests._support import strategies
from tests.schema.structure.generated import Structured, same, structures


def operator(
    namespace: str, structure: Structured, seen: list[Any], library: torchop.Library
) -> Any:
    def function(x: Tensor, cfg: Any, n: int = 1) -> Tensor:
        seen.append(cfg)
        return x * n

    function.__annotations__["cfg"] = structure.annotation
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), lib=library)
    op.register_fake(lambda x, cfg, n=1: torch.empty_like(x))
    return op


@strategies.manifold
@given(st.data())
def test_the_kernel_gets_equal_objects(namespace: str, data: st.DataObject) -> None:
    structure = data.draw(structures())
    values = data.draw(st.lists(structure.values, min_size=1, max_size=3))
    seen: list[Any] = []
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = operator(namespace, structure, seen, library)
        for value in values:
            seen.clear()
            op(torch.ones(1), value)
            op(cfg=value, x=torch.ones(1), n=2)
            # Call the operator with an unpickled value, and with flat arguments like a graph.
            op(torch.ones(1), pickle.loads(pickle.dumps(value)))
            args, kwargs = op._definition.structure.flat_arguments(torch.ones(1), value)
            op.overload(*args, **kwargs)
            assert len(seen) == 4
            assert all(same(found, value) for found in seen)
            assert all(found is not value or value is None for found in seen)


def compiled(op: Any, value: Any) -> Any:
    torch._dynamo.reset()
    program = torch.compile(lambda x, cfg: op(x, cfg) + 1, fullgraph=True, backend="aot_eager")
    return lambda x: program(x, value)


def exported(op: Any, value: Any) -> Any:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, value) + 1  # type: ignore[no-any-return]

    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (torch.ones(1),)), file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("program", [compiled, exported])
@settings(strategies.stable, max_examples=12)
@given(st.data())
def test_a_program_passes_equal_objects(namespace: str, program: Any, data: st.DataObject) -> None:
    structure = data.draw(structures())
    value = data.draw(structure.values)
    seen: list[Any] = []
    with torchop.Library(namespace, "FRAGMENT") as library:
        call = program(operator(namespace, structure, seen, library), value)
        assert call(torch.ones(1)).item() == 2
        assert len(seen) == 1
        assert same(seen[0], value)
