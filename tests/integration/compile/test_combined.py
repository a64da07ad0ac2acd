"""Operators inside other compiler features, such as checkpoints and nested compile regions.

These are the features in the second table of `docs/how-to/torch-compile.md`.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import leaf_function
from torch._inductor.exc import InductorError
from torch._inductor.utils import run_and_get_code
from torch._library.fake_profile import unsafe_generate_fake_kernels
from torch.export import draft_export
from torch.fx.passes.regional_inductor import regional_inductor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchop
from tests.integration.compile.graphs import Recorder


@dataclasses.dataclass(frozen=True)
class _Options:
    weight: Tensor
    scale: float = 2.0


@pytest.fixture
def block(namespace: str) -> Callable[[Tensor], Tensor]:
    """A function that calls operators of every kind, with and without mutation."""

    @torchop.custom_op(f"{namespace}::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.register_fake(like="x")
    cube.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    @torchop.custom_op(f"{namespace}::weighted", mutates_args=())
    def weighted(x: Tensor, options: _Options) -> Tensor:
        return x.sin() * options.weight * options.scale

    weighted.register_fake(lambda x, options: torch.empty_like(x))
    weighted.derive_autograd()

    @torchop.out_op(f"{namespace}::twice", like="x", elementwise=True, inplace=True)
    def twice(x: Tensor, *, out: Tensor) -> None:
        torch.mul(x, 2, out=out)

    twice.register_autograd(lambda ctx, grad: grad * 2)

    @torchop.custom_op(f"{namespace}::store", mutates_args=("buffer",))
    def store(x: Tensor, buffer: Tensor) -> None:
        buffer.copy_(x)

    def block(x: Tensor) -> Tensor:
        buffer = torch.zeros_like(x)
        store(x.detach(), buffer)
        y = twice(weighted(cube(x), _Options(buffer)))
        twice.inplace(y)
        return y.cos()

    return block


def _trained(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    y = function(x)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def _regions(block: Any) -> Callable[[Tensor], Tensor]:
    region = torch.compiler.nested_compile_region(block)
    return lambda x: region(region(x))


def _nonstrict(block: Any) -> Callable[[Tensor], Tensor]:
    return torch._dynamo.nonstrict_trace(block)  # type: ignore[no-any-return]


def _leaf(block: Any) -> Callable[[Tensor], Tensor]:
    leaf = leaf_function(lambda x: (block(x),))
    leaf.register_fake(lambda x: (torch.empty_like(x),))
    return lambda x: leaf(x)[0]


def _checkpointed_regions(block: Any) -> Callable[[Tensor], Tensor]:
    regions = _regions(block)
    return lambda x: checkpoint(lambda x: regions(x).sin(), x, use_reentrant=False)


def _checkpoints_in_regions(block: Any) -> Callable[[Tensor], Tensor]:
    return _regions(lambda x: checkpoint(block, x, use_reentrant=False))


COMBINED = (_regions, _nonstrict, _leaf, _checkpointed_regions, _checkpoints_in_regions)


@pytest.mark.parametrize("combine", COMBINED)
def test_a_program_is_trained_as_in_eager_mode(block, combine):
    function = combine(block)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_close(_trained(compiled), _trained(function))


def _operator(namespace: str) -> Any:
    """Define an operator that Inductor calls as it is, without compiling C++ code."""
    op = torchop.custom_op(f"{namespace}::op", _tripled, mutates_args=())
    op.register_fake(like="x")
    op.register_autograd(lambda ctx, grad: grad * 3)
    return op


def _tripled(x: Tensor) -> Tensor:
    return x * 3


def test_inductor_writes_the_code_of_a_nested_region_once(namespace):
    op = _operator(namespace)
    # PyTorch accepts only functions as nested compile regions, so wrap the operator in a lambda.
    function = _regions(lambda x: op(x))
    compiled = torch.compile(function, fullgraph=True)
    result, (code,) = run_and_get_code(compiled, torch.ones(4))
    assert_close(result, torch.full((4,), 9.0))
    assert code.count(f"torch.ops.{namespace}.op.default(") == 1


def test_region_compiled_by_regional_inductor(namespace):
    op = _operator(namespace)

    def function(x: Tensor) -> Tensor:
        with torch.fx.traceback.annotate({"compile_with_inductor": 0}):
            y = op(op(x.sin()))
        return y.cos()

    backend = aot_autograd(fw_compiler=regional_inductor, bw_compiler=regional_inductor)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.fx.traceback.preserve_node_meta(enable=False):
        assert_close(_trained(compiled), _trained(function))


def test_separately_compiled_layers_share_one_graph(namespace):
    op = _operator(namespace)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return op(x * self.weight)

    layers = torch.nn.Sequential(Layer(), Layer(), Layer())
    recorder = Recorder()
    for layer in layers:
        layer.compile(backend=recorder, fullgraph=True)
    with torch.no_grad():
        layers(torch.ones(4))
    assert len(recorder.graphs) == 1


def test_inductor_does_not_take_a_leaf_function(block):
    compiled = torch.compile(_leaf(block), fullgraph=True)
    with pytest.raises(InductorError, match="AssertionError"):
        compiled(torch.ones(4))


def test_pytorch_recomputes_a_checkpointed_region_with_other_random_numbers():
    # `docs/how-to/torch-compile.md` warns about this bug of PyTorch. If this test fails because
    # PyTorch fixed the bug, remove the warning.
    function = _checkpointed_regions(lambda x: torch.nn.functional.dropout(x * 1, 0.5))
    gradients = []
    for compiled in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        gradients.append(_trained(compiled)[1])
    assert not torch.equal(*gradients)


# PyTorch does not close the log file of draft export. Python warns when the garbage collector
# closes the file.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_profile_of_draft_export_replaces_a_fake_kernel(namespace):
    op = torchop.custom_op(f"{namespace}::op", _tripled, mutates_args=())

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x + 1)

    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="There was no fake impl registered"):
        torch.export.export(Model(), (x,))
    recorded = draft_export(Model(), (x,))._report.op_profiles
    with unsafe_generate_fake_kernels(recorded):
        program = torch.export.export(Model(), (x,))
        with pytest.raises(RuntimeError, match="no profiles match the given inputs"):
            torch.export.export(Model(), (x.double(),))
    assert_close(program.module()(x), Model()(x))
    gc.collect()
