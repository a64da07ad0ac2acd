"""Compiled operators whose fake kernels return an input, or the same tensor for two outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests._support.common import on_both


def test_fake_kernel_that_returns_its_input_works_unlike_stock(namespace):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::double", mutates_args=())
        def double(x: Tensor) -> Tensor:
            return x * 2

        double.register_fake(lambda x: x)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: Tensor) -> Tensor:
            y = x + 1
            return double(y) + y

        return function(torch.zeros(2)).tolist()

    ours, stock = on_both(scenario, namespace)
    assert ours == [3.0, 3.0]
    assert stock == [4.0, 4.0]


def _same_tensor_twice(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x)] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fake", [_same_tensor_twice, lambda x: [x, x]], ids=["same", "input"])
def test_outputs_described_by_one_fake_tensor_stay_separate(namespace, fake, backend):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::two", mutates_args=())
        def two(x: Tensor) -> list[Tensor]:
            return [x * 2, x * 3]

        two.register_fake(fake)

        @torch.compile(backend=backend, fullgraph=True)
        def function(x: Tensor) -> Tensor:
            first, second = two(x + 1)
            return first * 10 + second

        return function(torch.zeros(1)).item()

    ours, stock = on_both(scenario, namespace)
    assert ours == 23
    assert stock == 33


def test_fake_kernel_that_returns_mutated_inputs_compiles_and_exports(namespace):
    """The fake kernel returns the mutated inputs, but the kernel returns copies.

    Some packages for serving models have such fake kernels, so they must work, although a kernel
    must not return a mutated input.
    """

    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::store", mutates_args=("keys", "values"))
        def store(keys: Tensor, values: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
            keys[0], values[0] = new, 2 * new
            return keys.clone(), values.clone()

        store.register_fake(lambda keys, values, new: (keys, values))

        class Program(torch.nn.Module):
            def forward(self, keys: Tensor, values: Tensor, new: Tensor) -> Tensor:
                stored, others = store(keys, values, new)
                return stored + others + keys + values

        def run(program):
            inputs = torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1)
            return [tensor.tolist() for tensor in (program(*inputs), *inputs[:2])]

        inputs = torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(1)
        exported = torch.export.export(Program(), inputs)
        return (
            run(Program()),
            run(torch.compile(Program(), backend="aot_eager", fullgraph=True)),
            run(exported.module()),
            run(exported.run_decompositions({}).module()),
        )

    ours, stock = on_both(scenario, namespace)
    assert ours == stock
    assert ours == (ours[0],) * 4
