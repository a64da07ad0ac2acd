from __future__ import annotations

import pytest

from tests.native.gradients.recording import differentiable, save_inputs


@pytest.fixture
def cube(namespace):
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x.square()

    return differentiable(namespace, lambda x: x**3, "(Tensor x) -> Tensor", backward, save_inputs)
