"""Gradients with a release of PyTorch whose autograd nodes have fields unknown to torchop.

Uses private names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchop
from tests._support.common import needs_native
from torchop._native.extension import recipe

pytestmark = needs_native


def test_gradients_use_the_dispatcher_if_nodes_are_unknown(
    op: torchop.CustomOp[..., Any], monkeypatch: pytest.MonkeyPatch
):
    op.register_autograd(lambda ctx, grad: grad * 3)
    x = torch.ones(2, requires_grad=True)
    op(x)
    assert torchop.explain(op, x).native
    fields = recipe.node_fields()
    assert fields is not None
    monkeypatch.setattr(recipe, "node_fields", lambda: fields | {"hooks"})
    op.register_autograd(lambda ctx, grad: grad * 5)
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    assert "have the new field hooks" in (torchop.explain(op, x).reason or "")
