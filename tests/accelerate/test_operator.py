"""Acceleration does not change compilers, modes, transforms or deregistration."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.devices import BACKEND, TYPE
from tests.accelerate.support import (
    T,
    assert_same,
    counts_versions_once,
    outcome,
    stock,
)

pytestmark = needs_native


def test_four_threads(namespace, accelerated):
    def op(x: Tensor, k: int = 2) -> Tensor:
        return x * k

    handle = stock(namespace, op)
    handle.register_autograd(
        lambda ctx, g: (g * ctx.k, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]),
    )
    accelerated()
    wrong = []

    def work(k: int) -> None:
        for _ in range(500):
            x = torch.ones(2, requires_grad=True)
            handle(x, k).sum().backward()
            if x.grad[0].item() != k:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        handle.register_kernel(TYPE)(lambda x, k=2: x * k)
        acceleration = torchop.accelerate(f"{namespace}::*")
        acceleration.undo()
    for thread in threads:
        thread.join()
    assert wrong == []


@counts_versions_once
def test_none_for_a_mutated_argument_is_ignored_as_before(namespace, accelerated):
    def op(x: Tensor, y: Tensor | None) -> None:
        x.zero_()

    handle = stock(namespace, op, mutates_args={"x", "y"})
    assert_same(accelerated, handle, lambda: handle(T.clone(), None))


@counts_versions_once
def test_a_tensor_of_inference_mode_is_refused_as_before(namespace, accelerated):
    def op(x: Tensor) -> None:
        x.numpy()[0] = 1

    handle = stock(namespace, op, mutates_args={"x"})
    with torch.inference_mode():
        x = T.clone()
    before = outcome(lambda: handle(x))
    accelerated()
    assert outcome(lambda: handle(x)) == before
    with torch.inference_mode():
        handle(x)
    assert torchop.native.counters(handle) == {"mutation": 1, "native": 1}


def test_rules_work_as_before(namespace, accelerated, seen):
    def op(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x + 1

    handle = stock(namespace, op)
    handle.register_fake(lambda x: torch.empty_like(x))
    handle.register_vmap(lambda info, in_dims, x: (handle(x), in_dims[0]))
    torch.library.register_autocast(handle, TYPE, torch.bfloat16)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    accelerated()
    assert handle(T.to("meta")).device.type == "meta"
    assert torch.equal(torch.vmap(handle)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with torch.autocast(TYPE):
        assert handle(T).dtype is torch.bfloat16
    with Mode():
        handle(T)
    assert f"{namespace}.op.default" in seen
    counted = torchop.native.counters(handle)
    assert counted["keys"] >= 1  # at least for the call on the meta device
    assert counted["autocast"] == 1
    assert counted["mode"] >= 1
    assert torchop.explain(handle, T).native


def test_compiled_graphs_call_natively(namespace, accelerated, op):
    op.register_fake(lambda x: torch.empty_like(x))
    accelerated()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x):
        return op(x * 2) + getattr(torch.ops, namespace).op(x)

    expected = (T * 2 + 1) + (T + 1)
    assert torch.equal(program(T), expected)
    # Count native calls only after the first call, in which AOT Autograd also runs the operator.
    before = torchop.native.counters(op).get("native", 0)
    assert torch.equal(program(T), expected)
    assert torchop.native.counters(op)["native"] == before + 2


def test_turning_native_calls_off(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    handle = stock(namespace, op)
    accelerated()
    with torchop.native.disabled():
        assert torch.equal(handle(T), T + 1)
    assert torchop.native.counters(handle) == {"switched_off": 1}
    explanation = torchop.explain(handle, T)
    assert explanation.kernels[-1].startswith("kernel: ")
    assert "test_turning_native_calls_off" in explanation.kernels[-1]


def test_torchop_operator_keeps_its_own_native_calls(namespace, accelerated):
    @torchop.custom_op(f"{namespace}::ours", mutates_args=())
    def ours(x: Tensor) -> Tensor:
        return x + 1

    library = torchop.Library(namespace, "FRAGMENT")
    library.define("low(Tensor x) -> Tensor")
    library.impl("low", lambda x: x + 2, BACKEND)
    low = getattr(torch.ops, namespace).low
    acceleration = accelerated()
    low(T), low(T), ours(T)
    assert torchop.native.counters(ours)["native"] == 1
    assert torchop.native.counters(low)["native"] >= 1
    assert [row.reason for row in acceleration.operators] == [
        "it was defined with torchop, so its calls are native already"
    ] * 2
    library.close()


def test_kernel_registered_later_by_torchop_takes_over(namespace, accelerated, library):
    library.define("op(Tensor x) -> Tensor")
    acceleration = accelerated()
    torchop.impl(f"{namespace}::op", BACKEND, lambda x: x + 2, lib=library)
    op = getattr(torch.ops, namespace).op
    assert torch.equal(op(T), T + 2)
    assert torch.equal(op(T), T + 2)
    acceleration.undo()
    assert torch.equal(op(T), T + 2)


def test_a_destroyed_operator_is_no_longer_accelerated(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, BACKEND)
    overload = getattr(torch.ops, namespace).op.default
    acceleration = accelerated()
    overload(T)
    assert [row.accelerated for row in acceleration.operators] == [True]
    library._destroy()
    assert type(overload._op).__name__ == "builtin_function_or_method"
    assert acceleration.operators == ()
