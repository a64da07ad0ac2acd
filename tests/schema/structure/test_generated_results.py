"""However an operator is called, the caller gets the structures that the kernel returned."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchop
from tests._support import strategies
from tests.schema.structure.generated import RESULTS, Structured, same, structures


def operator(namespace: str, structure: Structured, value: Any, library: torchop.Library) -> Any:
    def function(x: Tensor) -> Any:
        return x + 1, renewed(value)  # compilers support no operators without tensors as results

    function.__annotations__["return"] = tuple[Tensor, structure.annotation]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), lib=library)
    op.register_fake(function)
    return op


def renewed(value: Any) -> Any:
    """Copy a structure, with new tensors in it."""
    if isinstance(value, Tensor):
        return torch.ones(value.shape)
    if isinstance(value, dict):
        return {key: renewed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return value if isinstance(value, torch.Size) else type(value)(map(renewed, value))
    if hasattr(value, "_fields"):
        return type(value)(*map(renewed, value))
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return type(value)(**{name: renewed(getattr(value, name)) for name in names})
    return value


@strategies.manifold
@given(st.data())
def test_callers_get_equal_objects(namespace: str, data: st.DataObject) -> None:
    structure = data.draw(structures(leaves=RESULTS))
    value = data.draw(structure.values)
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = operator(namespace, structure, value, library)
        for x in (torch.ones(1), torch.ones(1, requires_grad=True)):
            assert same(op(x)[1], value)
        with torchop.native.disabled():
            assert same(op(torch.ones(1))[1], value)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@settings(strategies.stable, max_examples=4)
@given(st.data())
def test_compiled_callers_get_equal_objects(
    namespace: str, backend: str, data: st.DataObject
) -> None:
    structure = data.draw(structures(leaves=RESULTS))
    value = data.draw(structure.values)
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = operator(namespace, structure, value, library)
        torch._dynamo.reset()
        program = torch.compile(lambda x: (op(x), x + 1), fullgraph=True, backend=backend)
        assert same(program(torch.ones(1))[0][1], value)


@settings(strategies.stable, max_examples=4)
@given(st.data())
def test_exported_programs_contain_equal_objects(namespace: str, data: st.DataObject) -> None:
    structure = data.draw(structures(leaves=RESULTS))
    value = data.draw(structure.values)
    seen: list[Any] = []
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = operator(namespace, structure, value, library)

        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Any:
                _, result = op(x)
                seen.append(result)
                return [t * 1 for t in tensors_of(result)], x + 1

        file = io.BytesIO()
        torch.export.save(torch.export.export(Model(), (torch.ones(1),)), file)
        file.seek(0)
        found, _ = torch.export.load(file).module()(torch.ones(1))
        assert same(found, [t * 1 for t in tensors_of(value)])
        assert len(tensors_of(seen[-1])) == len(found)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_of(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    names = getattr(value, "__dataclass_fields__", ())
    return [tensor for name in names for tensor in tensors_of(getattr(value, name))]


@settings(strategies.stable, max_examples=6)
@given(st.data())
def test_recorded_calls_can_be_made_again(namespace: str, data: st.DataObject) -> None:
    argument = data.draw(structures())
    structure = data.draw(structures(leaves=RESULTS))
    value, config = data.draw(structure.values), data.draw(argument.values)
    seen: list[Any] = []

    def function(x: Tensor, config: Any) -> Any:
        seen.append(config)
        return renewed(value)

    function.__annotations__ |= {"config": argument.annotation, "return": structure.annotation}
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), lib=library)
        with torchop.record(f"{namespace}::*") as recorded:
            op(torch.ones(1), config)
        (((call, count),),) = recorded.values()
        example = call.example()
        assert example is not None
        args, kwargs = example
        assert count == 1
        assert same(op._definition.structure.rebuilt_result(op.overload(*args, **kwargs)), value)
        assert len(tensors_of(seen[1])) == len(tensors_of(seen[0]))
