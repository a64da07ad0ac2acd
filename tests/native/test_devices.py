"""Devices that native calls accept. Uses private names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests._support.common import assert_clean, needs_native
from tests._support.forking import run_forked
from torchop._compat import dispatch
from torchop._native import switch

pytestmark = needs_native

# Native calls do not accept these devices, whose tensors have no data or compute it later.
WITHOUT_DATA = {"meta", "xla", "lazy"}
# Native calls do not accept these devices either, because they have no autograd key of their own.
# PyTorch uses AutogradOther for them, as for tensors of other layouts.
WITHOUT_AUTOGRAD = {"hip", "ve"}


def backends() -> Iterator[str]:
    """Yield the dispatch keys for dense tensors, for every device that has data and its own key."""
    for key in torch._C.DispatchKey.__members__:
        device_type = dispatch.device_of_key(key)
        if device_type is not None and not {device_type} & (WITHOUT_DATA | WITHOUT_AUTOGRAD):
            yield key


def test_devices_with_keys_of_their_own():
    native = switch.native_module()
    assert {"CPU", "CUDA", "PrivateUse1"} < set(native.backends)
    assert set(native.backends) == set(backends())


@pytest.mark.parametrize("key", ["AutogradMTIA", "AutogradCPU", "MAIA"])
def test_python_kernels_can_be_looked_up_by_key(op, key):
    """PyTorch cannot parse the names of some keys. torchop must find kernels at these keys, too."""
    native, name = switch.native_module(), op._definition.name
    assert native.python_kernel(name.packet, name.overload, key) is not None
    assert not dispatch.has_kernel(str(name), key)


LAZY = """
    import torch, torchop
    from torch._lazy import ts_backend

    ts_backend.init()
    op = torchop.custom_op(
        "lazy::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    x = torch.ones(2).to("lazy")
    print(op(x).tolist(), torchop.native.counters(op), torchop.explain(op, x).reason[:34])
"""


def test_lazy_tensors():
    printed = assert_clean(run_forked(LAZY))
    assert printed == "[2.0, 2.0] {'keys': 1} a tensor is not plain and dense (s\n"
