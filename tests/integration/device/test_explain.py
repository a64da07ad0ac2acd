from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, counting, needs_native

pytestmark = needs_native


def ones() -> Tensor:
    return torch.ones(2, device="standin:1")


def test_a_native_call(namespace):
    op = adding(namespace)
    explanation = torchop.explain(op, ones())
    assert explanation.native
    assert explanation.keys == (
        "AutogradPrivateUse1",
        "ADInplaceOrView",
        "BackendSelect",
        "PrivateUse1",
    )
    with counting(op) as calls:
        op(ones())
    assert calls == {"native": 1}


def test_the_fallback_of_the_backend_runs_without_a_kernel(namespace):
    op = adding(namespace, device_types="cpu")
    explanation = torchop.explain(op, ones())
    assert explanation.reason == (
        "the dispatcher would run the kernel at PrivateUse1, which is not a Python function"
    )


def test_a_kernel_that_takes_dispatch_keys(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda keys, x: x + 1, "PrivateUse1", with_keyset=True)
    with torchop.accelerate(f"{namespace}::*"):
        reason = torchop.explain(f"{namespace}::op", ones()).reason
    assert reason == "its kernel for PrivateUse1 (standin) takes dispatch keys"
    library._destroy()


def test_tensors_on_devices_of_several_types(namespace):
    op = torchop.custom_op(
        f"{namespace}::add",
        lambda x, y: x + y,
        mutates_args=(),
        schema="(Tensor x, Tensor y) -> Tensor",
    )
    explanation = torchop.explain(op, ones(), torch.tensor(1.0))
    assert explanation.reason == "the tensors are on devices of several types"
    assert explanation.keys[-1] == "PrivateUse1"  # the dispatcher finds the kernel at this key


def test_a_gradient_without_a_formula(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("plain(Tensor x) -> Tensor")
    library.impl("plain", lambda x: x.detach() + 1, "PrivateUse1")
    with torchop.accelerate(f"{namespace}::plain"):
        explanation = torchop.explain(f"{namespace}::plain", ones().requires_grad_())
        assert explanation.native
        assert explanation.kernels[0].startswith("autograd: PyTorch's fallback")
        result = getattr(torch.ops, namespace).plain(ones().requires_grad_())
        with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
            result.sum().backward()
    library._destroy()
