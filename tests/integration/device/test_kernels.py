"""Kernels on a device whose backend falls back to the CPU."""

from __future__ import annotations

from typing import List, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import in_threads, on_both
from tests.integration.device import standin

LIBRARIES = pytest.mark.parametrize("library", [torch.library, torchop])


def doubling(library, namespace, seen=None):
    def double(x: Tensor, k: float = 2.0) -> Tensor:
        if seen is not None:
            seen.append(x.device.type)
        return x * k

    return library.custom_op(f"{namespace}::double", double, mutates_args=(), device_types="cpu")


@LIBRARIES
def test_a_call_runs_through_the_fallback_of_the_backend(namespace, library):
    seen = []
    op = doubling(library, namespace, seen)
    op.register_autograd(lambda ctx, grad: (grad * 2, None))
    x = torch.ones(3, device="standin:1", requires_grad=True)
    for number in (1, 2):
        with standin.trace() as lines:
            result = op(x)
        assert f"{namespace}::double on 1.0" in lines
        assert (result.device, result.tolist()) == (x.device, [2, 2, 2])
        result.sum().backward()
        assert x.grad.tolist() == [2 * number] * 3
    with torch.no_grad():
        assert op(x, 3.0).tolist() == [3, 3, 3]
    with torch.inference_mode():
        assert getattr(torch.ops, namespace).double(x, k=3.0).tolist() == [3, 3, 3]
    assert set(seen) == {"cpu"}


@LIBRARIES
def test_the_fallback_writes_into_the_tensors_of_the_caller(namespace, library):
    @library.custom_op(f"{namespace}::fill", mutates_args=("out",), device_types="cpu")
    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    x, out = torch.ones(3, device="standin"), torch.zeros(3, device="standin")
    for version in (1, 2):
        fill(x * version, out)
        assert (out.tolist(), out._version) == ([version] * 3, version)


def test_a_call_without_tensors_runs_through_the_fallback(namespace):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::make", mutates_args=(), device_types="cpu")
        def make(n: int, device: torch.device) -> Tensor:
            return torch.ones(n, device=device)

        return [make(2, torch.device(name)) for name in ("standin:1", "standin:1", "cpu")]

    both = on_both(scenario, namespace)
    # With torch.library, a BackendSelect kernel rejects the call before the fallback of the backend
    # could run.
    assert "does not have a kernel registered for standin" in str(both.stock)
    assert [(str(r.device), r.tolist()) for r in both.ours] == [
        ("standin:1", [1, 1]),
        ("standin:1", [1, 1]),
        ("cpu", [1, 1]),
    ]


def test_an_optional_list_runs_through_the_fallback(namespace):
    # The only tensors are in an optional list, which the dispatcher ignores when it selects a
    # backend. torchop must select the backend, which falls back to the CPU kernel.
    @torchop.custom_op(f"{namespace}::total", mutates_args=(), device_types="cpu")
    def total(xs: Optional[List[Tensor]]) -> Tensor:
        return sum(xs)

    x = torch.ones(3, device="standin:1")
    with standin.trace() as lines:
        result = total([x, x])
    assert f"{namespace}::total on 1.0" in lines
    assert result.tolist() == [2, 2, 2]


def test_a_fallback_may_be_registered_later(namespace):
    x = torch.ones(3, device="standin")
    with standin.without_fallback():
        op = doubling(torchop, namespace)
        with pytest.raises(
            torchop.MissingKernelError, match=r"registered for standin; it has .* cpu"
        ):
            op(x)
    assert op(x).tolist() == [2, 2, 2]


def test_a_device_without_a_fallback_gets_the_message_as_before(namespace):
    op = doubling(torchop, namespace)
    sparse = torch.ones(3).to_sparse()
    for _ in range(2):
        with pytest.raises(torchop.MissingKernelError, match="registered for cpu with the layout"):
            op(sparse)
        with pytest.raises(torchop.MissingFakeError):
            op(torch.ones(3, device="meta"))
        assert op(torch.ones(3, device="standin")).tolist() == [2, 2, 2]


def test_an_explanation_shows_the_fallback_before_the_first_call(namespace):
    op = doubling(torchop, namespace)
    explanation = torchop.explain(op, torch.ones(3, device="standin"))
    assert explanation.kernels[-1] == "PrivateUse1: registered by standin [backend fallback]"
    assert not explanation.native


@LIBRARIES
@pytest.mark.parametrize("is_called_before", [True, False])
@pytest.mark.parametrize("devices", [None, "standin"])
def test_registered_kernel_takes_precedence_over_the_fallback(
    namespace, library, is_called_before, devices
):
    op = doubling(library, namespace)
    x = torch.ones(3, device="standin")
    if is_called_before:
        op(x)
    op.register_kernel(devices, lambda x, k=2.0: torch.zeros_like(x))
    with standin.trace() as lines:
        assert op(x).tolist() == [0, 0, 0]
    assert not any(line.startswith(namespace) for line in lines)
    assert op(torch.ones(1)).tolist() == [2]
    if devices is None:
        assert op(torch.ones(1).to_sparse()).is_sparse


def test_next_operator_of_the_name_does_not_use_the_fallback(namespace):
    x = torch.ones(3, device="standin")
    for _ in range(2):
        op = doubling(torchop, namespace)
        assert op(x).tolist() == [2, 2, 2]
    with pytest.warns(torchop.RedefinitionWarning):
        every = torchop.custom_op(
            f"{namespace}::double", lambda x: x * 5, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
    assert every(x).tolist() == [5, 5, 5]
    assert every(torch.ones(1).to_sparse()).to_dense().tolist() == [5]


def test_first_calls_in_several_threads(namespace):
    x = torch.ones(3, device="standin")
    for number in range(20):
        op = doubling(torchop, f"{namespace}_{number}")
        results = in_threads(lambda _, op=op: op(x).tolist(), 4)
        assert results == [[2, 2, 2]] * 4


@LIBRARIES
def test_a_compiled_function_runs_through_the_fallback(namespace, library):
    op = doubling(library, namespace)
    op.register_fake(lambda x, k=2.0: torch.empty_like(x))
    x = torch.ones(3, device="standin")
    compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == [3, 3, 3]
    with torch._subclasses.FakeTensorMode() as mode:
        assert op(mode.from_tensor(x)).device == x.device


def test_a_derived_formula(namespace):
    op = doubling(torchop, namespace)
    op.derive_autograd()
    x = torch.ones(3, device="standin", requires_grad=True)
    result = op(x)
    assert result.tolist() == [2, 2, 2]
    result.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@LIBRARIES
@pytest.mark.parametrize("name", ["standin", "privateuseone"])
def test_autocast_rule_of_the_device_applies_during_recording(namespace, library, name):
    seen = []

    def product(x: Tensor) -> Tensor:
        seen.append((x.dtype, (x.float() @ x.float()).dtype))
        return x.clone()

    op = library.custom_op(f"{namespace}::product", product, mutates_args=())
    try:
        op.register_autocast(name, torch.bfloat16)
    except ValueError:
        assert library is torch.library
        pytest.skip("torch.library knows autocast for the CPU and CUDA only in this release")
    x = torch.ones(2, 2, device="standin")
    with torch.autocast("standin", dtype=torch.float16):
        op(x)
        with torchop.record(f"{namespace}::*") as recorded:
            op(x)
    # A rule registered under "privateuseone", the original name of the device type, works in
    # torchop. torch.library accepts the rule, but does not use it.
    is_cast = library is torchop or name == "standin"
    assert seen == [(torch.bfloat16 if is_cast else torch.float32, torch.float32)] * 2
    assert recorded.calls(f"{namespace}::product") == 1
