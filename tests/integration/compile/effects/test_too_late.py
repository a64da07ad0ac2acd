"""Declaring an effect raises if a compiler has already used the operator.

Uses private names.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import torchop
from tests._support.devices import BACKEND
from tests.integration.compile.effects.calls import CALLS
from torchop._compat.registries import effect_of


def _compile(op: Any) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        op(x)
        return x + 1

    function(torch.ones(2))


def _define(namespace: str, **options: Any) -> Any:
    def kernel(x: Tensor) -> Tensor:
        return x.clone()

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), **options)
    op.register_fake(lambda x: torch.empty_like(x))
    return op


def test_an_effect_is_refused_after_the_operator_was_compiled(namespace: str) -> None:
    op = _define(namespace)
    _compile(op)
    with pytest.raises(torchop.TracingError, match=f"{namespace}::op: a compiler has already") as e:
        op.register_effect(torchop.EffectType.ORDERED)
    assert 'custom_op(..., effects="ordered")' in str(e.value)
    op.register_effect(None)  # the operator had no effect, so nothing changes and nothing is raised
    assert "effect" not in repr(op)


def test_running_and_faking_an_operator_is_not_too_early(namespace: str) -> None:
    op = _define(namespace)
    op(torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        op(torch.ones(2))
    op.register_effect("ordered")


def test_the_remedy_for_an_operator_that_a_compiler_would_remove_works(namespace: str) -> None:
    with pytest.warns(torchop.SchemaWarning):
        op = torchop.custom_op(
            f"{namespace}::op", CALLS.append, mutates_args=(), schema="(Tensor x) -> ()"
        )
    op.register_fake(lambda x: None)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a compiler would remove it"):
        _compile(op)
    op.register_effect("ordered")
    _compile(op)
    assert len(CALLS) == 1


def test_an_effect_is_removed_after_the_operator_was_compiled(namespace: str) -> None:
    op = _define(namespace, effects="ordered")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning, because nothing has been compiled
        op.register_effect(None)
        op.register_effect("ordered")
    _compile(op)
    for nothing in (None, "none"):
        with pytest.warns(UserWarning, match=f"{namespace}::op.* still keep every call, in order"):
            op.register_effect(nothing)
        assert effect_of(f"{namespace}::op") is None
    torch.compiler.reset()
    _compile(op)
    with pytest.raises(torchop.TracingError, match="traced the operator without an effect"):
        op.register_effect("ordered")


def test_a_graph_keeps_its_calls_after_the_effect_is_removed(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: CALLS.append(x) or x.clone(), BACKEND)
        torchop.register_fake(f"{namespace}::op", torch.empty_like, lib=library)
        torchop._register_effectful_op(f"{namespace}::op", torchop.EffectType.ORDERED)
        op, graphs = getattr(torch.ops, namespace).op, []

        def function(x: Tensor) -> Tensor:
            op(x)
            return x + 1

        def keep_graph(graph: Any, inputs: Any) -> Any:
            graphs.append(str(graph.graph))
            return graph

        backend = aot_autograd(fw_compiler=keep_graph)
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        compiled(torch.ones(2))
        with pytest.warns(UserWarning, match="graphs that were compiled before still keep"):
            torchop._register_effectful_op(f"{namespace}::op", None)
        compiled(torch.ones(2))
        assert len(CALLS) == 2
        torch.compiler.reset()
        compiled(torch.ones(2))
        assert ["with_effects" in graph for graph in graphs] == [True, False]


def test_a_definition_with_another_effect_is_refused_too(namespace: str) -> None:
    op = _define(namespace)
    _compile(op)
    with pytest.raises(torchop.TracingError, match="traced the operator without an effect"):
        _define(namespace, effects="ordered")
    assert op(torch.ones(1)).item() == 1  # the first definition is still registered
    _define(namespace)


def test_torch_library_returns_a_graph_without_the_effect(cached: None, namespace: str) -> None:
    # This shows why torchop raises. Even after a reset, the compiler's cache returns the graph from
    # before the effect was declared, because the cache key contains only the operator's name. So
    # the call is lost.
    @torch.library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        CALLS.append(1)
        return x.clone()

    op.register_fake(lambda x: torch.empty_like(x))

    def function(x: Tensor) -> Tensor:
        op(x)
        return x + 1

    torch.compile(function, fullgraph=True)(torch.ones(2))
    op.register_effect(torchop.EffectType.ORDERED)
    torch._dynamo.reset()
    torch.compile(function, fullgraph=True)(torch.ones(2))
    assert CALLS == []
