"""`explain` reports the path of calls that record a gradient. Uses private names."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad

import torchop
from tests._support.common import adding, needs_native
from tests._support.devices import BACKEND
from tests.inspect.explain.checking import T, check, needing_grad
from torchop._native.extension import recipe
from torchop._native.reasons import Reason

pytestmark = needs_native


def test_native_with_a_gradient(op):
    op(needing_grad())
    explanation = check(op, Reason.NATIVE, needing_grad())
    assert explanation.kernels[0] == "autograd: records the gradient"


def test_gradient_on_a_pytorch_with_other_nodes(op, monkeypatch):
    op(needing_grad())
    check(op, Reason.NATIVE, needing_grad())
    fields = recipe.node_fields() | {"more"}
    monkeypatch.setattr(recipe, "node_fields", lambda: fields)
    op.register_autograd(lambda ctx, grad: (grad, None))
    explanation = check(op, Reason.GRADIENT, needing_grad())
    assert " have the new field more, which this version of torchop" in explanation.reason
    check(op, Reason.NATIVE, T)


def test_gradient_of_a_derived_formula(namespace):
    op = adding(namespace)
    op.derive_autograd()
    op(needing_grad())
    explanation = check(op, Reason.NATIVE, needing_grad())
    assert explanation.kernels[0] == "autograd: records the gradient"


def test_gradient_without_a_formula(namespace):
    torchop.define(f"{namespace}::op", "(Tensor x) -> Tensor")
    torchop.impl(f"{namespace}::op", BACKEND, lambda x: x + 1)
    op = f"{namespace}::op"
    getattr(torch.ops, namespace).op(T)
    explanation = torchop.explain(op, needing_grad())
    assert explanation.native
    autograd, kernel = explanation.kernels
    assert (
        autograd == "autograd: PyTorch's fallback, which records that the operator has no formula"
    )
    assert "<lambda>" in kernel
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert torchop.explain(op, needing_grad()).reason == Reason.ANOMALY.text
    with torch.no_grad():
        assert len(torchop.explain(op, needing_grad()).kernels) == 1


def test_gradient_through_a_list(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: [x + 1], mutates_args=(), schema="(Tensor x) -> Tensor[]"
    )
    op.register_autograd(lambda ctx, grads: grads[0])
    check(op, Reason.GRADIENT, needing_grad())
    check(op, Reason.NATIVE, needing_grad())


def test_gradient_through_a_mutated_argument(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, y: x + y,
        mutates_args=(),
        schema="(Tensor x, Tensor y) -> Tensor",
    )
    op.register_autograd(lambda ctx, grad: (grad, grad))
    inplace = op.derive_inplace()
    explanation = check(inplace, Reason.GRADIENT, T.clone(), needing_grad())
    assert explanation.reason.endswith(
        "it rebases the history of the tensors that the operator mutates"
    )
