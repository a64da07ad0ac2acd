"""Calls run the kernels that other libraries register for the device over those of torchop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import assert_clean, counting, needs_native
from tests._support.forking import run_forked
from tests.integration.device import standin

pytestmark = needs_native


def ones(**options: Any) -> Tensor:
    return torch.ones(2, device="standin", **options)


@pytest.fixture
def op(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    op.register_autograd(lambda ctx, grad: grad * 3)
    op(ones())
    op(ones(requires_grad=True))
    return op


@pytest.fixture
def fragment(namespace: str) -> Iterator[torch.library.Library]:
    library = torch.library.Library(namespace, "FRAGMENT")
    yield library
    library._destroy()


def both_paths(op: Any, x: Callable[[], Tensor]) -> tuple[list[float], dict[str, int]]:
    """Check that native and dispatched calls have the same result.

    Return the result, and the number of calls by counter.
    """
    with counting(op) as calls:
        result = op(x())
    with torchop.native.disabled():
        expected = op(x())
    assert result.tolist() == expected.tolist()
    assert result.requires_grad == expected.requires_grad
    return result.tolist(), calls


@pytest.mark.parametrize("key", ["PrivateUse1", "AutogradPrivateUse1"])
def test_a_kernel_at_a_key_of_the_device(op, fragment, key):
    fragment.impl("op", lambda x: x.detach() + 7, key)
    result, calls = both_paths(op, ones)
    assert result == [8, 8]
    assert calls == {"kernel": 1}
    assert f"the kernel at {key}" in torchop.explain(op, ones()).reason
    # An override at a key of the device does not affect tensors on the CPU, which have other keys.
    assert both_paths(op, lambda: torch.ones(2)) == ([2, 2], {"native": 1})


def test_a_kernel_at_the_key_of_another_device(op, fragment):
    fragment.impl("op", lambda x: x + 7, "CPU")
    fragment.impl("op", lambda x: x + 7, "AutogradCPU")
    assert both_paths(op, ones) == ([2, 2], {"native": 1})
    assert both_paths(op, lambda: ones(requires_grad=True)) == ([2, 2], {"native": 1})


# Replaces PyTorch's fallback for autograd. The previous fallback cannot be restored, so each case
# runs this program in its own process.
FALLBACKS = """
    import sys, torch, torchop
    from tests.integration.device import standin

    standin.load()
    x = torch.ones(2, device="standin", requires_grad=True)

    def fallback(op, *args, **kwargs):
        standin.note(f"fallback of {op.name()}")
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    ours = torchop.custom_op(
        "ours::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    ours.register_autograd(lambda ctx, grad: grad)
    library = torch.library.Library("ours", "FRAGMENT")
    library.define("low(Tensor x) -> Tensor")
    library.impl("low", lambda x: x.detach() + 2, "PrivateUse1")
    torchop.accelerate("ours::low").__enter__()

    def show():
        for name in "op", "low":
            call = getattr(torch.ops.ours, name)
            call(x)
            outcomes = []
            for context in torch.no_grad, torch.enable_grad:
                with context(), standin.trace() as trace:
                    call(x)
                    native = torchop.explain(f"ours::{name}", x).native
                with context(), torchop.native.disabled(), standin.trace() as dispatched:
                    call(x)
                assert trace == dispatched, (trace, dispatched)
                outcomes.append((native, [line for line in trace if "::" + name in line]))
            print(name, *outcomes)

    show()
    everybody = torch.library.Library("_", "IMPL")
    chosen = fallback if sys.argv[1] == "python" else torch.library.fallthrough_kernel
    everybody.fallback(chosen, "AutogradPrivateUse1")
    show()
"""


@pytest.mark.parametrize("chosen", ["python", "fallthrough"])
def test_a_fallback_of_the_backend_for_autograd(chosen):
    """A new fallback for the device's autograd key affects operators without an autograd kernel.

    `op` has one, because torchop registers an autograd kernel for each operator. `low`, from
    torch.library, has none, so its calls run the fallback, and are native only if the fallback
    falls through.
    """
    native, met = "(True, [])", "(False, ['fallback of ours::low'])"
    *before, op, low = assert_clean(run_forked(FALLBACKS, chosen)).splitlines()
    assert before == [f"op {native} {native}", f"low {native} {native}"]
    assert op == f"op {native} {native}"
    assert low == (f"low {met} {met}" if chosen == "python" else f"low {native} {native}")


def test_without_a_fallback_for_kernels(op, namespace):
    only_cpu = torchop.custom_op(
        f"{namespace}::only_cpu",
        lambda x: x + 1,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        device_types="cpu",
    )
    nothing = torch.empty(2, device="standin")
    with standin.without_fallback():
        with pytest.raises(torchop.MissingKernelError, match="standin"):
            only_cpu(nothing)
        with pytest.raises(NotImplementedError, match="aten::add"):
            op(nothing)  # the kernel runs, but calls `aten::add`, which has no kernel
    assert both_paths(op, ones) == ([2, 2], {"native": 1})
