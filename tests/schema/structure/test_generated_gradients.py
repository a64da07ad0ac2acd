"""Gradients of generated results reach formulas and backward kernels as the result's structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchop
from tests._support import strategies
from tests.schema.structure.generated import RESULTS, Structured, structures
from tests.schema.structure.test_generated_results import renewed, tensors_of


def operator(
    namespace: str, structure: Structured, value: Any, library: torchop.Library, is_kernel: bool
) -> tuple[Any, list[Any]]:
    seen: list[Any] = []

    def function(x: Tensor) -> Any:
        return renewed(value)

    def kernel(grad: Any, x: Tensor) -> Tensor:
        seen.append(grad)
        total = sum(tensor.sum() for tensor in tensors_of(grad) if tensor.numel())
        return torch.full_like(x, 0.0) + total

    function.__annotations__["return"] = structure.annotation
    kernel.__annotations__["grad"] = structure.annotation
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), lib=library)
    op.register_fake(function)
    if is_kernel:
        op.register_autograd(backward_kernel=kernel)
    else:
        op.register_autograd(
            lambda ctx, grad: kernel(grad, *ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    return op, seen


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@settings(strategies.stable, max_examples=8, phases=[Phase.generate])  # shrinking would compile
@given(st.data())
def test_gradients(namespace: str, backend: str, is_kernel: bool, data: st.DataObject) -> None:
    structure = data.draw(structures(leaves=RESULTS))
    value = data.draw(structure.values)
    assume(any(tensor.numel() for tensor in tensors_of(value)))
    with torchop.Library(namespace, "FRAGMENT") as library:
        op, seen = operator(namespace, structure, value, library, is_kernel)

        def program(x: Tensor) -> Any:
            return tensors_of(op(x))

        torch._dynamo.reset()
        call = program
        if backend != "none":
            compiled: Any = torch.compile(op, fullgraph=True, backend=backend)
            call = lambda x: tensors_of(compiled(x))  # noqa: E731  (the name would shadow `call`)
        x = torch.zeros(1, requires_grad=True)
        found = call(x)
        weights = [index + 1.0 for index in range(len(found))]
        loss = sum(weight * tensor.sum() for weight, tensor in zip(weights, found, strict=True))
        assert isinstance(loss, Tensor)
        loss.backward()
        expected = sum(w * t.numel() for w, t in zip(weights, found, strict=True))
        assert x.grad is not None
        assert x.grad.item() == expected
        if backend == "none":
            (grad,) = seen
            assert type(grad) is type(value)
            gradients = [tensor.unique().tolist() for tensor in tensors_of(grad)]
            assert gradients == [[w] * bool(t.numel()) for w, t in zip(weights, found, strict=True)]
