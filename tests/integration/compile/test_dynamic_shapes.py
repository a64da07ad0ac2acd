from __future__ import annotations

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.integration.compile.cases import CASES, define
from tests.integration.compile.graphs import BACKENDS, Recorder


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_every_size_of_a_dynamic_dimension(namespace, backend):
    case = CASES["a list of outputs"]
    op = define(namespace, case)
    recorder = Recorder(backend)

    def function(x: Tensor) -> Tensor:
        first, second = op(x)
        return first.sum(0) + second.sum(0)

    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for size in (6, 9, 20):
        x = torch.randn(size, 3)
        assert_close(compiled(x), function(x))
    assert len(recorder.graphs) == 1


def test_an_int_argument_that_varies_becomes_symbolic(namespace):
    @torchop.custom_op(f"{namespace}::repeat", mutates_args=())
    def repeat(x: Tensor, times: int) -> Tensor:
        return x.repeat(times)

    repeat.register_fake(lambda x, times: x.new_empty(x.shape[0] * times))
    recorder = Recorder("aot_eager")
    compiled = torch.compile(lambda x, n: repeat(x, n) + 1, backend=recorder, fullgraph=True)
    for times in (2, 3, 4, 5, 6):
        assert_close(compiled(torch.ones(2), times), torch.full((2 * times,), 2.0))
    # Dynamo compiles one graph for the first value of `times`, and one dynamic graph for all
    # others.
    assert len(recorder.graphs) == 2


def test_a_size_of_the_input_can_be_an_argument(namespace):
    @torchop.custom_op(f"{namespace}::first", mutates_args=())
    def first(x: Tensor, count: int) -> Tensor:
        return x[:count].clone()

    first.register_fake(lambda x, count: x.new_empty(count))
    recorder = Recorder("aot_eager")
    compiled = torch.compile(
        lambda x: first(x, x.shape[0] // 2), backend=recorder, fullgraph=True, dynamic=True
    )
    assert [compiled(torch.ones(n)).shape[0] for n in (4, 10, 13)] == [2, 5, 6]
    assert len(recorder.graphs) == 1


def _nonzero(namespace: str, **bounds: int) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::nonzero", mutates_args=())
    def nonzero(x: Tensor) -> Tensor:
        return torch.nonzero(x).squeeze(1)

    @nonzero.register_fake
    def _(x):
        return x.new_empty(torchop.get_ctx().new_dynamic_size(**bounds), dtype=torch.int64)

    return nonzero


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_size_of_an_output_may_depend_on_data(namespace, backend):
    nonzero = _nonzero(namespace)
    recorder = Recorder(backend)
    compiled = torch.compile(lambda x: nonzero(x) * 2, backend=recorder, fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for ones in ([], [3], [0, 2, 4]):
            x = torch.zeros(5)
            x[ones] = 1
            assert compiled(x).tolist() == [2 * index for index in ones]
    assert len(recorder.graphs) == 1


def test_compiler_uses_the_bounds_of_a_size(namespace):
    nonzero = _nonzero(namespace, min=2, max=4)
    recorder = Recorder()

    @torch.compile(backend=recorder, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        found = nonzero(x)
        # The size of `found` depends on data. These comparisons do not break the graph only because
        # the fake kernel declares bounds of the size.
        return found + (1 if found.shape[0] < 5 else 2) + (10 if found.shape[0] >= 2 else 20)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert function(torch.tensor([0.0, 1.0, 1.0])).tolist() == [12, 13]


def test_a_size_that_depends_on_data_breaks_the_graph_where_that_is_not_captured(namespace):
    nonzero = _nonzero(namespace)
    recorder = Recorder()
    compiled = torch.compile(lambda x: nonzero(x + 1) * 2, backend=recorder)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        assert compiled(torch.tensor([-1.0, 0.0])).tolist() == [2]
    assert nonzero.overload not in recorder.targets
    assert len(recorder.graphs) == 2
