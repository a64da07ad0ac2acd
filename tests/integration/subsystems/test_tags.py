"""Tags of an operator are set on its overload, so compilers take them into account."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.exc
import torch._inductor.config
from torch import Tag, Tensor
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.utils import (
    get_first_incompatible_cudagraph_node,
    run_and_get_code,
    set_customized_partition_wrappers,
)
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchop
from tests._support.devices import TYPE
from tests._support.releases import INPLACE, OUT
from tests.integration.compile.graphs import AotRecorder, Recorder, fresh_compiler

# All tags except two that require the schema of an in-place or out= operator.
TAGS = [tag for tag in Tag.__members__.values() if tag not in (INPLACE, OUT)]


@pytest.mark.parametrize("tag", TAGS, ids=lambda tag: tag.name)
def test_a_tag_reaches_the_overload_with_the_compliance_tag(namespace, tag):
    op = torchop.custom_op(f"{namespace}::op", _halve, mutates_args=(), tags=tag)
    assert set(op.tags) == {tag, Tag.pt2_compliant_tag}
    assert set(op.overload.tags) == {tag, Tag.pt2_compliant_tag}


def _halve(x: Tensor) -> Tensor:
    return x / 2


# --------------------------------------------------------------------------------------------------
# Layout


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        # The same strides as in eager mode, in which the argument is every second row of a
        # transposed 4 by 3 matrix.
        ((), (12, 2, 4)),
        (Tag.needs_exact_strides, (12, 2, 4)),
        # The order of the dimensions is the same as in eager mode, but the elements are dense.
        (Tag.needs_fixed_stride_order, (6, 1, 2)),
        (Tag.needs_contiguous_strides, (6, 3, 1)),
        # Inductor may choose the layout that is cheapest to compute.
        (Tag.flexible_layout, (12, 6, 1)),
    ],
    ids=str,
)
def test_a_layout_tag_decides_the_strides_that_inductor_passes(namespace, tags, expected):
    seen = []

    @torchop.custom_op(f"{namespace}::strides", mutates_args=(), tags=tags)
    def strides(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.clone(memory_format=torch.contiguous_format)

    @strides.register_fake
    def _(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def function(x: Tensor) -> Tensor:
        return strides((x.permute(0, 2, 1) + 1)[:, ::2])

    x = torch.randn(2, 3, 4)
    assert_close(torch.compile(function, fullgraph=True)(x), function(x))
    compiled, eager = seen
    assert eager == (12, 2, 4)
    assert compiled == expected


# --------------------------------------------------------------------------------------------------
# CUDA graphs


@pytest.mark.parametrize("tagged", [False, True])
def test_cudagraph_unsafe_operator_prevents_cuda_graphs(namespace, tagged):
    tags = Tag.cudagraph_unsafe if tagged else ()
    op = torchop.custom_op(f"{namespace}::op", _halve, mutates_args=(), tags=tags)
    op.register_fake(lambda x: torch.empty_like(x))
    recorder = AotRecorder()
    torch.compile(lambda x: op(x + 1) * 2, backend=recorder, fullgraph=True)(torch.ones(2))
    (graph,) = recorder.forward
    node = get_first_incompatible_cudagraph_node(graph)
    assert (node.target if node else None) is (op.overload if tagged else None)


@pytest.mark.parametrize(
    ("kind", "tagged"),
    [("alone", False), ("alone", True), ("planned", True), ("overwriting", True)],
)
def test_inductor_divides_a_graph_at_a_cudagraph_unsafe_operator(
    namespace, monkeypatch, kind, tagged
):
    tags = Tag.cudagraph_unsafe if tagged else ()
    if kind == "alone":
        op = torchop.custom_op(f"{namespace}::op", _halve, mutates_args=(), tags=tags)
        op.register_fake(like="x")
    else:
        over = kind == "overwriting"
        options = {"like": "x", "inplace": over, "elementwise": over}
        op = torchop.out_op(f"{namespace}::op", _write_half, tags=tags, **options)
    # Inductor splits only GPU graphs at such an operator, so pretend that all nodes run on a GPU.
    # The wrapper below is called with each part of the graph that would become a CUDA graph.
    monkeypatch.setattr(BaseSchedulerNode, "is_gpu", lambda node: True)
    parts: list[Any] = []
    set_customized_partition_wrappers(lambda part, metadata: parts.append(metadata) or part)
    try:
        with fresh_compiler(), torch._inductor.config.patch(graph_partition=True):
            compiled = torch.compile(lambda x: op(x.sin() + 1).cos() * 2, fullgraph=True)
            result, (code,) = run_and_get_code(compiled, torch.ones(3))
    finally:
        set_customized_partition_wrappers(None)
    assert_close(result, ((torch.ones(3).sin() + 1) / 2).cos() * 2)
    recorded = [text for text in code.split("def ") if text.startswith("partition_")]
    call = f"torch.ops.{namespace}.op"
    assert [call in text for text in recorded] == ([False, False] if tagged else [True])
    assert len(parts) == len(recorded)
    assert call in code


def _write_half(x: Tensor, *, out: Tensor) -> None:
    torch.div(x, 2, out=out)


# --------------------------------------------------------------------------------------------------
# Randomness


def _noise(namespace: str, tags: Any) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::noise", mutates_args=(), tags=tags)
    def noise(x: Tensor) -> Tensor:
        return torch.rand_like(x)

    noise.register_fake(lambda x: torch.empty_like(x))
    return noise


@pytest.mark.parametrize("tagged", [False, True])
def test_a_seeded_operator_draws_the_same_numbers_when_a_checkpoint_recomputes_it(
    namespace, tagged
):
    noise = _noise(namespace, Tag.nondeterministic_seeded if tagged else ())
    recorder = AotRecorder()

    @torch.compile(backend=recorder, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: (x * noise(x.detach())).sin(), x, use_reentrant=False)

    x = torch.full((8,), 0.5, requires_grad=True)
    result = function(x)
    result.sum().backward()
    drawn = result.detach().asin() / x.detach()
    is_the_gradient = torch.allclose(x.grad, drawn * (x.detach() * drawn).cos())
    (backward,) = recorder.backward
    assert ("run_with_rng_state" in backward.code) is tagged
    assert is_the_gradient is tagged


@pytest.mark.parametrize("tagged", [False, True])
def test_a_seeded_operator_does_not_run_at_trace_time_even_on_constants(namespace, tagged):
    runs = []
    noise = _noise(namespace, Tag.nondeterministic_seeded if tagged else ())

    @noise.register_kernel(TYPE)
    def _(x):
        runs.append(x)
        return torch.rand_like(x)

    compiled = torch.compile(
        lambda x: x + noise(torch.tensor(0.5)), backend="aot_eager", fullgraph=True
    )
    compiled(torch.zeros(2))
    # Without the tag, PyTorch also runs the operator while it traces, to replace the result by a
    # constant.
    assert (len(runs) == 1) is tagged
    runs.clear()
    compiled(torch.zeros(2))
    assert len(runs) == 1


# --------------------------------------------------------------------------------------------------
# Pointwise


def test_a_pointwise_operator_applies_to_nested_tensors(namespace):
    op = torchop.custom_op(f"{namespace}::op", _halve, mutates_args=(), tags=Tag.pointwise)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    result = op(nested)
    assert result.is_nested
    assert [len(component) for component in result.unbind()] == [2, 4]
    assert_close(result.values(), torch.full((6, 3), 0.5))


def test_an_operator_without_the_tag_does_not_apply_to_nested_tensors(namespace):
    op = torchop.custom_op(f"{namespace}::op", _halve, mutates_args=())
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=f"{namespace}.op.default"):
        op(nested)


# --------------------------------------------------------------------------------------------------
# Compliance


def test_operator_compiles_with_only_allow_pt2_compliant_ops(namespace):
    op = torchop.custom_op(f"{namespace}::op", _halve, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    recorder = Recorder()
    with torch._dynamo.config.patch(only_allow_pt2_compliant_ops=True):
        torch.compile(lambda x: op(x), backend=recorder, fullgraph=True)(torch.ones(2))
    assert recorder.targets == [op.overload]


def test_operator_of_library_define_is_not_compliant(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", _halve, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::op", torch.empty_like, lib=library)
        op = getattr(torch.ops, namespace).op.default
        compiled = torch.compile(lambda x: op(x), backend="eager", fullgraph=True)
        with (
            torch._dynamo.config.patch(only_allow_pt2_compliant_ops=True),
            pytest.raises(torch._dynamo.exc.Unsupported, match="not PT2 compliant"),
        ):
            compiled(torch.ones(2))
