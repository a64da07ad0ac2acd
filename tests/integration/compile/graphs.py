from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload

from tests._support.combinations import BACKENDS as BACKENDS

# Backends for tests with large programs. Without the marker, Inductor would spend most of the time
# compiling C++ for PyTorch's own operators.
WITHOUT_CPP = ["aot_eager", pytest.param("inductor", marks=pytest.mark.without_cpp)]


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Reset the compilers before and after the block, and turn off their disk caches.

    The disk caches identify an operator by its name, not by its rules. So a test could get a graph
    that another test with the same operator name left in the cache in an earlier run.
    """
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


class Recorder:
    def __init__(self, backend: str = "eager") -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return self._compile(graph, inputs)

    @property
    def targets(self) -> list[OpOverload]:
        return [target for graph in self.graphs for target in operators(graph)]


class AotRecorder:
    """A backend that records AOT Autograd's forward and backward graphs and runs them."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self._compile = aot_autograd(
            fw_compiler=self._keeper(self.forward),
            bw_compiler=self._keeper(self.backward),
            inference_compiler=self._keeper(self.forward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return self._compile(graph, inputs)

    @staticmethod
    def _keeper(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return keep


def operators(graph: torch.fx.GraphModule) -> list[OpOverload]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
