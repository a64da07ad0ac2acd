"""Gradients on a PyTorch with unknown autograd nodes. Uses private names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchop
from tests._support.common import needs_native
from torchop._native.extension import recipe

pytestmark = needs_native


def test_calls_with_unknown_nodes_are_recorded_by_the_dispatcher(
    op: torchop.CustomOp[..., Any], monkeypatch: pytest.MonkeyPatch
):
    op.register_autograd(lambda ctx, grad: grad * 3)
    x = torch.ones(2, requires_grad=True)
    op(x)
    assert torchop.explain(op, x).native
    fields = recipe.node_fields()
    assert fields is not None
    monkeypatch.setattr(recipe, "node_fields", lambda: fields | {"hooks"})
    op.register_autograd(lambda ctx, grad: grad * 5)  # compiles another plan
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    assert "have the new field hooks" in (torchop.explain(op, x).reason or "")
