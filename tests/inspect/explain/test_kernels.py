"""`explain` names the kernel, or the reason for using the dispatcher. Uses private names."""

from __future__ import annotations

import contextlib

import pytest
import torch

import torchop
from tests._support.common import counting, needs_native
from tests._support.devices import AUTOGRAD, BACKEND, BACKEND_SHOWN, OTHER, OTHER_BACKEND, TYPE
from tests.inspect.explain.checking import T, check
from torchop._native.reasons import Reason

pytestmark = needs_native


def test_kernel_of_a_device(op):
    @op.register_kernel(TYPE)
    def special(x, n=1):
        return x + n

    assert "special" in check(op, Reason.NATIVE, T).kernels[-1]
    with op.set_kernel_enabled(TYPE, enabled=False):
        assert "special" not in check(op, Reason.NATIVE, T).kernels[-1]


def test_kernel_that_is_an_object(namespace):
    class Kernel:
        def __call__(self, x):
            return x + 1

    op = torchop.custom_op(
        f"{namespace}::op", Kernel(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert check(op, Reason.NATIVE, T).kernels[-1] == "kernel: Kernel"


def test_kernel_that_is_missing(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x + 1,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        device_types=OTHER,
    )
    assert check(op, Reason.KERNEL, T).reason == f"it has no kernel for {BACKEND_SHOWN}"


def test_kernel_that_takes_dispatch_keys(op):
    with torchop.Library(op.name.split("::")[0], "IMPL") as guest:
        guest.impl("op", lambda keys, x, n=1: x + 7, OTHER_BACKEND, with_keyset=True)
        check(op, Reason.NATIVE, T)
        guest.impl("op", lambda keys, x, n=1: x + 7, "BackendSelect", with_keyset=True)
        reason = check(op, Reason.KERNEL, T).reason
    assert (
        reason == "the dispatcher would run the kernel at BackendSelect, which takes dispatch keys"
    )


def test_kernel_that_is_in_cpp(op):
    guest = torch.library.Library(op.name.split("::")[0], "FRAGMENT")
    guest.m.register_ad_inplace_or_view_fallback("op")
    reason = check(op, Reason.KERNEL, T).reason
    guest._destroy()
    assert reason == (
        "the dispatcher would run the kernel at ADInplaceOrView, which is not a Python function"
    )


def test_kernel_for_views(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x.view(-1),
        mutates_args=(),
        schema="(Tensor(a) x) -> Tensor(a)",
    )
    assert check(op, Reason.KERNEL, T).reason == "PyTorch's kernel for views must run"
    with torch.inference_mode():
        check(op, Reason.NATIVE, torch.zeros(2))


# Each case has three parts. The first maps the dispatch key of each kernel to True if the kernel
# takes a DispatchKeySet as its first argument. The second is the counter that a call with a tensor
# on the tested device increments, and the third is the expected explanation of this call.
LOW_LEVEL = {
    "with keys": (
        {BACKEND: True},
        "operator",
        f"its kernel for {BACKEND_SHOWN} takes dispatch keys",
    ),
    "with keys, for every device": (
        {"CompositeExplicitAutograd": True},
        "operator",
        "its kernel for CPU takes dispatch keys",  # one kernel serves all devices
    ),
    "none for a device": (
        {"Meta": False},
        "operator",
        "it has no kernel for a device whose tensors native calls take",
    ),
    "for another device": (
        {OTHER_BACKEND: False, "Meta": False},
        "kernel",
        f"it has no kernel for {BACKEND_SHOWN}",
    ),
    "at Autograd, with keys": (
        {BACKEND: False, "Autograd": True},
        "kernel",
        f"the dispatcher would first run the kernel at {AUTOGRAD}",
    ),
    "at BackendSelect, with keys": (
        {BACKEND: False, "BackendSelect": True},
        "kernel",
        "the dispatcher would first run the kernel at BackendSelect",
    ),
}


def kernel_of(takes_keys):
    return (lambda keys, x: x + 1) if takes_keys else (lambda x: x + 1)


@pytest.mark.parametrize("kernels", LOW_LEVEL)
def test_kernel_of_the_low_level(namespace, kernels):
    kernels, counted, reason = LOW_LEVEL[kernels]
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        for key, takes_keys in kernels.items():
            library.impl("op", kernel_of(takes_keys), key, with_keyset=takes_keys)
        op = getattr(torch.ops, namespace).op
        op(T.to("meta") if "Meta" in kernels else T)  # the first call creates the call plan
        explanation = torchop.explain(op, T)
        with counting(op) as calls, contextlib.suppress(NotImplementedError):
            op(T)
    assert not explanation.native
    assert explanation.reason == reason
    assert calls == {counted: 1}


@pytest.mark.parametrize("device", [BACKEND, OTHER_BACKEND])
def test_a_kernel_of_another_library(namespace, device):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", kernel_of(device == BACKEND), device, with_keyset=device == BACKEND)
    with torchop.accelerate(f"{namespace}::*"):
        reason = torchop.explain(f"{namespace}::op", T).reason
    library._destroy()
    assert (
        reason
        == {
            BACKEND: f"its kernel for {BACKEND_SHOWN} takes dispatch keys",
            OTHER_BACKEND: f"it has no kernel for {BACKEND_SHOWN}",
        }[device]
    )
